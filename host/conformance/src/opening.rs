//! Cases about opening a plugin, and about what its manifest says of the opened instance.

use host_plugin_api::{ErrorCode, Opening, PoolOpening};
use host_plugins::{PluginError, load_root, open_allocator, open_tier, open_transfer};

use super::instance::{Instance, full_pool};
use super::observe::threads;
use super::{Case, Outcome, Stop, Subject, ensure};

const fn case(name: &'static str, about: &'static str, run: fn(&Subject) -> Outcome) -> Case {
    Case { name, role: None, capability: None, about, run }
}

pub(super) const CASES: &[Case] = &[
    case("manifest-matches", "roles, memory and threads are as the manifest says", matches),
    case(
        "config-defaults",
        "it opens with no configuration, and with all of its defaults written out",
        defaults,
    ),
    case(
        "config-unknown-key",
        "a key that the manifest does not declare, or of another type, is refused",
        unknown_key,
    ),
    case("config-garbage", "text that is no TOML is an error or ignored, and harmless", garbage),
];

fn matches(subject: &Subject) -> Outcome {
    let manifest = subject.manifest();
    let before = threads();
    let instances = subject.instances("manifest")?;
    let started = threads().saturating_sub(before);
    let says = manifest.plugin.threads.as_deref();
    ensure!(
        says != Some("none") || started == 0,
        "the manifest says threads = \"none\", and an open instance runs {started}"
    );
    for role in &manifest.roles {
        let instance = instances.iter().find(|instance| instance.role() == role.kind);
        // The kit cannot open roles that only a newer host knows.
        let Some(instance) = instance else { continue };
        if let Some(taken) = instance.registers_dram() {
            let listed = role.memory.iter().any(|memory| memory == "dram");
            ensure!(
                !listed || taken.is_ok(),
                "role {} lists dram, but register answered {taken:?}",
                role.kind
            );
            ensure!(listed || taken.is_err(), "role {} takes dram, but does not list it", role.kind);
        }
    }
    instances.into_iter().try_for_each(Instance::end)?;
    Ok(())
}

/// Opens and ends an instance of each role with this configuration. Returns the reasons of roles that need another configuration.
fn with(subject: &Subject, config: String) -> Result<Vec<String>, Stop> {
    let subject = Subject { entry: subject.entry.clone(), config, ..*subject };
    let (instances, unconfigured) = subject.opened("config")?;
    instances.into_iter().try_for_each(Instance::end)?;
    Ok(unconfigured)
}

fn defaults(subject: &Subject) -> Outcome {
    let unconfigured = with(subject, subject.config.clone())?;
    let keys = subject.manifest().config.iter();
    let written: toml::Table =
        keys.filter_map(|(key, of)| Some((key.clone(), of.default.clone()?))).collect();
    if !written.is_empty() && !subject.configured {
        let refused = |why: &str| Stop::Fail(format!("its own defaults, written out, are refused: {why}"));
        let still = with(subject, written.to_string()).map_err(|stop| match stop {
            Stop::Fail(why) | Stop::Skip(why) => refused(&why),
        })?;
        // A role that opens without a configuration must also open with the defaults written out.
        if still.len() > unconfigured.len() {
            return Err(refused(&still.join("; ")));
        }
    }
    if unconfigured.is_empty() { Ok(()) } else { Err(Stop::Skip(unconfigured.join("; "))) }
}

fn unknown_key(subject: &Subject) -> Outcome {
    let mut wrong = vec!["no_such_key_ = 1".to_owned()];
    if let Some((key, of)) = subject.manifest().config.iter().next() {
        wrong.push(format!("{key:?} = {}", if of.kind == "string" { "1" } else { "\"text\"" }));
    }
    for config in wrong {
        let opening = Opening { name: "config".to_owned(), config: config.clone() };
        let pool = PoolOpening { config: config.clone(), ..full_pool(4) };
        for role in &subject.manifest().roles {
            let opened = match role.kind.as_str() {
                "transfer" => open_transfer(&subject.entry, &opening).map(drop),
                "tier" => open_tier(&subject.entry, &opening).map(drop),
                "allocator" => open_allocator(&subject.entry, &pool).map(drop),
                _ => continue,
            };
            ensure!(
                matches!(opened, Err(PluginError::Config { .. })),
                "`{config}` was not refused by the manifest"
            );
        }
    }
    Ok(())
}

fn garbage(subject: &Subject) -> Outcome {
    // Calls the root directly, because the host's own check would refuse the text. The plugin may accept the text, or
    // refuse it with `CONFIG`.
    let root = load_root(&subject.entry).map_err(|error| error.to_string())?;
    for garbage in ["= [not toml", "\u{0}\u{1}\u{fffd}", &"[".repeat(5000)] {
        let opening = Opening { name: "config".to_owned(), config: garbage.to_owned() };
        for role in root.roles() {
            let refused = match role {
                "transfer" => root.open_transfer(&opening).err(),
                "tier" => root.open_tier(&opening).err(),
                _ => root.open_allocator(&PoolOpening { config: garbage.to_owned(), ..full_pool(4) }).err(),
            };
            if let Some(error) = refused {
                ensure!(
                    error.code == ErrorCode::CONFIG,
                    "a configuration that is no TOML was answered with {error}, it should be CONFIG"
                );
            }
        }
    }
    Ok(())
}
