//! Where a new crate gets `host-plugin-api` from.

use std::fmt;
use std::path::{Path, PathBuf};

use semver::{Version, VersionReq};

use super::carried;

/// The crate `host-plugin-api`.
pub enum Api {
    /// A folder.
    Path(PathBuf),
    /// A registry.
    Version(VersionReq),
    /// This program, which writes it into the new crate.
    Carried,
}

impl Api {
    /// The API that the command line names.
    ///
    /// # Errors
    /// A sentence, when it is neither a folder with the crate nor a version.
    pub fn of(text: &str) -> Result<Self, String> {
        let path = Path::new(text);
        match VersionReq::parse(text) {
            _ if is_api(path) => Ok(Self::Path(absolute(path))),
            Ok(version) => Ok(Self::Version(version)),
            Err(_no_version) => Err(format!(
                "--api {text:?} is neither the folder of host-plugin-api nor a version such as 0.1"
            )),
        }
    }

    /// The API of the checkout around the working directory or this program; else the one that this program carries.
    pub fn here() -> Self {
        let starts = [std::env::current_dir(), std::env::current_exe()];
        let found =
            starts.iter().flatten().flat_map(|start| start.ancestors()).map(|at| at.join("plugin-api"));
        let found = found.into_iter().find(|path| is_api(path));
        found.map_or(Self::Carried, |path| Self::Path(absolute(&path)))
    }

    /// The versions that fit this host.
    pub fn published() -> Self {
        let own = Version::parse(host_plugin_api::VERSION).unwrap_or_else(|_| Version::new(0, 1, 0));
        let text = match own.major {
            0 => format!("0.{}", own.minor),
            major => format!("{major}"),
        };
        Self::Version(VersionReq::parse(&text).unwrap_or(VersionReq::STAR))
    }

    /// As `Cargo.toml` writes it.
    pub fn dependency(&self) -> String {
        let quoted = |text: String| toml::Value::String(text).to_string();
        match self {
            Self::Path(path) => format!("{{ path = {} }}", quoted(path.display().to_string())),
            Self::Version(version) => quoted(version.to_string().trim_start_matches('^').to_owned()),
            Self::Carried => format!("{{ path = {} }}", quoted(carried::FOLDER.to_owned())),
        }
    }
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "the API in {}", path.display()),
            Self::Version(version) => write!(f, "version {version} of the API"),
            Self::Carried => write!(f, "the API in its folder {}", carried::FOLDER),
        }
    }
}

fn is_api(path: &Path) -> bool {
    let manifest = std::fs::read_to_string(path.join("Cargo.toml"));
    manifest.is_ok_and(|text| text.lines().any(|line| line.trim() == "name = \"host-plugin-api\""))
}

fn absolute(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}
