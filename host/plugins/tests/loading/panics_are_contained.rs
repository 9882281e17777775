//! A panic inside a plugin is an error code and a poisoned instance, and the process lives.

use std::sync::Arc;

use host_plugin_api::{ErrorCode, Opening, Tag, TransferBackend};
use host_plugins::{Catalog, PluginError, open_transfer};
use host_tests::alone::in_a_process_of_its_own;
use host_tests::plugin_files;

fn open(place: &str) -> Result<Arc<dyn TransferBackend>, PluginError> {
    let directory = plugin_files::directory(&["panicking"]);
    let catalog = Catalog::scan([directory.path()]);
    let opening = Opening { name: "test".into(), config: format!("in = \"{place}\"") };
    open_transfer(catalog.find("panicking").unwrap(), &opening)
}

#[test]
fn panics_in_calls_factory_and_drop_leave_the_process_alive() {
    in_a_process_of_its_own(|| {
        let backend = open("poll").unwrap();
        assert_eq!(backend.settled(Tag(1)), 1);
        assert_eq!(backend.poll(&mut []), ErrorCode::PANICKED.0);
        // Each call says that the instance is poisoned.
        assert_eq!(backend.settled(Tag(1)), ErrorCode::PANICKED.0);
        assert_eq!(backend.endpoint().unwrap_err().code, ErrorCode::PANICKED);
        assert_eq!(backend.limits().max_writes, 0);
        // Another instance of the same library works.
        assert!(open("nowhere").unwrap().endpoint().is_ok());
        drop(backend);

        let backend = open("endpoint").unwrap();
        for _ in 0..2 {
            let error = backend.endpoint().unwrap_err();
            assert_eq!(error.code, ErrorCode::PANICKED);
            assert_eq!(error.message, "the plugin panicked: told to panic in endpoint");
        }
        drop(open("drop").unwrap());
        let error = open("open").err().unwrap();
        assert!(
            error.to_string().contains("PANICKED: the plugin panicked: told to panic while opening"),
            "{error}"
        );
    });
}
