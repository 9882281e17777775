//! Sources of `host-plugin-api` and of a kit for a new crate.

use std::fmt;
use std::path::{Path, PathBuf};

use semver::{Version, VersionReq};

use toml::Value;

use super::carried::{self, Carried};

/// The source of the crate `host-plugin-api`.
pub enum Api {
    /// A folder with the crate.
    Path(PathBuf),
    /// A registry, with a version.
    Version(VersionReq),
    /// This program, which writes the crate into the new one.
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

    /// The API of the checkout around the working directory or this program, or else the one that this program carries.
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

    /// The dependency in the form of `Cargo.toml`.
    pub fn dependency(&self) -> Value {
        match self {
            Self::Path(path) => at(&path.display().to_string()),
            Self::Version(version) => Value::String(version.to_string().trim_start_matches('^').to_owned()),
            Self::Carried => at(carried::API.folder),
        }
    }

    /// The dependency in the `Cargo.toml` of a kit in a folder of the new crate.
    pub fn dependency_of_kit(&self) -> Value {
        match self {
            Self::Carried => at(&format!("../{}", carried::API.folder)),
            Self::Path(_) | Self::Version(_) => self.dependency(),
        }
    }

    /// The folder of a kit in the checkout that has the API. `None` if the kit must be written into the new crate: kits are no part
    /// of the ABI and in no registry.
    pub fn kit(&self, kit: &Carried) -> Option<PathBuf> {
        let Self::Path(api) = self else { return None };
        let folder = api.join(kit.beside_api);
        is_crate(&folder, kit.name).then(|| absolute(&folder))
    }
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "the API in {}", path.display()),
            Self::Version(version) => write!(f, "version {version} of the API"),
            Self::Carried => write!(f, "the API in its folder {}", carried::API.folder),
        }
    }
}

/// A dependency on the crate in a folder.
pub fn at(folder: &str) -> Value {
    Value::Table([("path".to_owned(), Value::String(folder.to_owned()))].into_iter().collect())
}

fn is_api(path: &Path) -> bool {
    is_crate(path, carried::API.name)
}

fn is_crate(path: &Path, name: &str) -> bool {
    let manifest = std::fs::read_to_string(path.join("Cargo.toml"));
    manifest.is_ok_and(|text| text.lines().any(|line| line.trim() == format!("name = \"{name}\"")))
}

fn absolute(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}
