//! Finds NIXL's library, and says where it was looked for when it is not there.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use host_plugin_api::{Error, ErrorCode, Result};

/// File name of the library.
pub const FILE: &str = "libnixl_capi.so";

/// The settings that decide where to look.
pub struct Places {
    /// The configuration's `library`.
    pub configured: Option<PathBuf>,
    /// `NIXL_LIBRARY`.
    pub named: Option<OsString>,
    /// Folders in which Python may keep packages.
    pub packages: Vec<PathBuf>,
}

impl Places {
    /// Takes the settings from the configuration and the environment.
    pub fn of(configured: Option<PathBuf>) -> Self {
        Self { configured, named: std::env::var_os("NIXL_LIBRARY"), packages: site_packages() }
    }

    /// Whether the operator says which library is used. Else the plugin looks for one.
    pub fn named_by_the_operator(&self) -> bool {
        self.configured.is_some() || self.named.as_ref().is_some_and(|path| !path.is_empty())
    }

    /// Paths in the order of the search. A bare name is looked up by the system's loader. A path that a user names is
    /// the only candidate: falling back to another version would hide the mistake.
    pub fn candidates(&self) -> Vec<PathBuf> {
        if let Some(path) = &self.configured {
            return vec![library_at(path)];
        }
        if let Some(path) = self.named.as_ref().filter(|path| !path.is_empty()) {
            return vec![library_at(Path::new(path))];
        }
        let mut all = vec![PathBuf::from(FILE)];
        for folder in &self.packages {
            all.extend(in_packages(folder));
        }
        all
    }
}

/// The library itself, or the one in a folder that was named instead.
fn library_at(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(FILE) } else { path.to_owned() }
}

/// The libraries of NIXL's wheels in one folder of packages. A wheel keeps them in a hidden folder of its build system,
/// or, after a repair for other systems, in one named after the wheel. The number is that of the CUDA it was built for.
fn in_packages(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let of_wheel = |name: &String| {
        let plain = name.strip_prefix('.').unwrap_or(name);
        plain.starts_with("nixl") && (plain.ends_with(".libs") || !plain.contains('.'))
    };
    let mut found: Vec<PathBuf> = names.filter(of_wheel).map(|name| folder.join(name).join(FILE)).collect();
    found.retain(|path| path.is_file());
    found.sort();
    found
}

/// Folders of packages of the Python environments in sight: the active one, and those of the first `python3` on the path.
fn site_packages() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from).collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    for folder in std::env::split_paths(&path) {
        let python = folder.join("python3");
        if python.is_file() {
            roots.extend(folder.parent().map(Path::to_owned));
            // A `python3` of a virtual environment is a link out of it, to where the system's packages are.
            let real = std::fs::canonicalize(&python).ok();
            roots.extend(real.and_then(|real| Some(real.parent()?.parent()?.to_owned())));
            break;
        }
    }
    let mut found: Vec<PathBuf> = std::env::var_os("PYTHONPATH")
        .map(|paths| std::env::split_paths(&paths).collect())
        .unwrap_or_default();
    for lib in roots.iter().flat_map(|root| [root.join("lib"), root.join("lib64")]) {
        let Ok(entries) = std::fs::read_dir(&lib) else { continue };
        let pythons = entries.filter_map(|entry| entry.ok()).filter(|entry| {
            let name = entry.file_name();
            name.to_str().is_some_and(|name| name.starts_with("python3"))
        });
        let mut versions: Vec<PathBuf> = pythons.map(|entry| entry.path()).collect();
        versions.sort();
        found.extend(versions.iter().flat_map(|v| [v.join("site-packages"), v.join("dist-packages")]));
    }
    let mut seen = Vec::new();
    found.retain(|folder| {
        let new = folder.is_dir() && !seen.contains(folder);
        seen.push(folder.clone());
        new
    });
    found
}

/// The error of a search that found nothing.
pub fn not_found(places: &Places, tried: &[(PathBuf, String)]) -> Error {
    let mut text = "NIXL's library cannot be used; tried".to_owned();
    for (path, why) in tried {
        text.push_str(&format!("\n    {}: {why}", path.display()));
    }
    if !places.named_by_the_operator() {
        for folder in &places.packages {
            text.push_str(&format!("\n    {}: no nixl package with {FILE} that works", folder.display()));
        }
    }
    text.push_str(
        "\n  install it with `pip install --no-deps nixl-cu12` (nixl-cu13 for CUDA 13; neither needs a GPU) into the \
         Python environment that is active here, or give the path of libnixl_capi.so in NIXL_LIBRARY or as library \
         in [plugin.nixl]",
    );
    Error::new(ErrorCode::UNSUPPORTED, text)
}

/// Where a library's plugins may be, seen from its folder, besides `plugins`, where NIXL 1.5 looks for itself: one folder
/// up, as installs for several architectures have them, or in a folder named for NIXL.
const ELSEWHERE: [&str; 4] = ["../plugins", "nixl/plugins", "nixl", "../nixl/plugins"];

/// The folder of its own plugins that NIXL has to be told so that it finds a backend. `None` when NIXL finds the
/// backend by itself, in `plugins` beside the library or where `NIXL_PLUGIN_DIR` says.
///
/// # Errors
/// With the folder that lacks it.
pub fn plugin_folder(library: &Path, directory: Option<OsString>, backend: &str) -> Result<Option<PathBuf>> {
    let file = format!("libplugin_{backend}.so");
    // A library by bare name is wherever the loader found it. NIXL itself reports a plugin that it lacks.
    let home = library.parent().filter(|folder| !folder.as_os_str().is_empty());
    let (folder, from) = match (directory, home) {
        (Some(set), _) => (PathBuf::from(set), "NIXL_PLUGIN_DIR"),
        (None, Some(home)) => (home.join("plugins"), "the folder beside the library"),
        (None, None) => return Ok(None),
    };
    if folder.join(&file).is_file() {
        return Ok(None);
    }
    if from != "NIXL_PLUGIN_DIR"
        && let Some(home) = home
        && let Some(other) = ELSEWHERE.iter().map(|at| home.join(at)).find(|at| at.join(&file).is_file())
    {
        return Ok(Some(other));
    }
    let text = format!(
        "{} has no {file}, but {}; {from} is where {} looks for its plugins: name another, or set NIXL_PLUGIN_DIR to the \
         folder that has it",
        folder.display(),
        backends(&folder),
        library.display()
    );
    Err(Error::new(ErrorCode::UNSUPPORTED, text))
}

/// The names of NIXL's backends in a folder of plugins.
fn backends(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let backend = |name: String| Some(name.strip_prefix("libplugin_")?.strip_suffix(".so")?.to_owned());
    let mut found: Vec<String> = names.filter_map(backend).collect();
    found.sort();
    if found.is_empty() { "no other either".to_owned() } else { found.join(", ") }
}

/// The version of the wheel that a library belongs to, for messages.
pub fn wheel_version(library: &Path) -> Option<String> {
    let packages = library.parent()?.parent()?;
    let entries = std::fs::read_dir(packages).ok()?;
    let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let info = names.find(|name| name.starts_with("nixl_cu") && name.ends_with(".dist-info"))?;
    Some(info.trim_end_matches(".dist-info").replace('-', " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_wheels_are_found_in_hidden_and_plain_folders() {
        let scratch = tempfile::tempdir().unwrap();
        let packages = scratch.path();
        for folder in [".nixl_cu12.mesonpy.libs", "nixl_cu13.libs", "nixl_cu12", "other.libs"] {
            std::fs::create_dir_all(packages.join(folder)).unwrap();
        }
        for folder in [".nixl_cu12.mesonpy.libs", "nixl_cu13.libs", "other.libs"] {
            std::fs::write(packages.join(folder).join(FILE), "").unwrap();
        }
        let found = in_packages(packages);
        let expected = [".nixl_cu12.mesonpy.libs", "nixl_cu13.libs"].map(|f| packages.join(f).join(FILE));
        assert_eq!(found, expected);
    }

    #[test]
    fn what_the_user_names_is_all_that_is_tried_and_the_message_says_how_to_install() {
        let places =
            Places { configured: None, named: Some("/no/such.so".into()), packages: vec!["/p".into()] };
        assert_eq!(places.candidates(), [PathBuf::from("/no/such.so")]);
        let configured = Places { configured: Some("/cfg.so".into()), ..places };
        assert_eq!(configured.candidates(), [PathBuf::from("/cfg.so")]);
        let neither = Places { configured: None, named: None, packages: vec!["/p".into()] };
        assert_eq!(neither.candidates(), [PathBuf::from(FILE)]);
        let error = not_found(&neither, &[(FILE.into(), "not there".into())]);
        for part in [FILE, "not there", "/p", "pip install", "NIXL_LIBRARY"] {
            assert!(error.message.contains(part), "{error}");
        }
    }

    #[test]
    fn a_library_is_told_of_plugins_that_it_would_not_find_and_refused_without_any() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("x86");
        let library = home.join(FILE);
        let told = |directory: Option<&str>, backend: &str| {
            plugin_folder(&library, directory.map(OsString::from), backend)
        };
        let add = |place: PathBuf| {
            std::fs::create_dir_all(&place).unwrap();
            std::fs::write(place.join("libplugin_UCX.so"), "").unwrap();
        };
        let error = told(None, "UCX").unwrap_err();
        assert!(error.message.contains("no other either"), "{error}");
        std::fs::create_dir_all(&home).unwrap();
        for place in ELSEWHERE.iter().rev() {
            add(home.join(place));
            assert_eq!(told(None, "UCX").unwrap(), Some(home.join(place)));
        }
        assert!(told(Some("/elsewhere"), "UCX").is_err(), "what a user sets is not second-guessed");
        add(home.join("plugins"));
        assert_eq!(told(None, "UCX").unwrap(), None, "NIXL finds them by itself");
        let error = told(None, "GDS").unwrap_err();
        assert!(error.message.contains("has no libplugin_GDS.so, but UCX;"), "{error}");
        assert_eq!(plugin_folder(Path::new(FILE), None, "UCX").unwrap(), None);
    }
}
