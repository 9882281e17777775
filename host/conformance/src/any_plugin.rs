//! Cases for every plugin.

use host_plugin_api::capability;
use host_plugins::load_root;

use super::instance::Instance;
use super::observe::{descriptors, threads, wait_for};
use super::wording::with_article;
use super::{Case, Outcome, Stop, Subject, ensure};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "manifest",
        role: None,
        capability: None,
        about: "the manifest is readable, its id and its config keys are well-formed",
        run: manifest,
    },
    Case {
        name: "load",
        role: None,
        capability: None,
        about: "the library loads, its types fit, it is what its note says, and loading starts no threads",
        run: load,
    },
    Case {
        name: "lifecycle",
        role: None,
        capability: None,
        about: "instances live side by side, and leave no thread or descriptor behind when they end",
        run: lifecycle,
    },
    Case {
        name: "lifecycle-drop",
        role: None,
        capability: None,
        about: "instances that are dropped without a shutdown leave no thread or descriptor behind",
        run: dropped,
    },
];

/// Number of instances that are opened one after the other to find what each leaves behind.
const INSTANCES: usize = 20;

fn manifest(subject: &Subject) -> Outcome {
    let manifest = subject.manifest();
    let id = &manifest.plugin.id;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    ensure!(id.contains('.') && id.chars().all(plain), "the id {id:?} is not of the form com.example.name");
    let name = &manifest.plugin.name;
    ensure!(!name.is_empty() && !name.contains([',', '/', ' ']), "users cannot write the name {name:?}");
    ensure!(!manifest.roles.is_empty(), "the manifest declares no role");
    for role in &manifest.roles {
        let unknown = role.capabilities.iter().find(|c| !capability::ALL.contains(&c.as_str()));
        if let Some(unknown) = unknown {
            ensure!(
                false,
                "role {} declares {unknown:?}, which is no capability of API {}",
                role.kind,
                host_plugin_api::VERSION
            );
        }
    }
    for (key, of) in &manifest.config {
        let kinds = ["string", "integer", "float", "boolean", "array", "table"];
        ensure!(
            kinds.contains(&of.kind.as_str()),
            "config key {key:?} has the type {:?}, not one of {}",
            of.kind,
            kinds.join(", ")
        );
        if let Some(default) = &of.default {
            let found = default.type_str();
            let (kind, other) = (with_article(&of.kind), with_article(found));
            ensure!(found == of.kind, "config key {key:?} is {kind}, but its default is {other}");
        }
        ensure!(!of.doc.is_empty(), "config key {key:?} has no doc");
    }
    Ok(())
}

fn load(subject: &Subject) -> Outcome {
    let before = threads();
    let root = load_root(&subject.entry).map_err(|error| error.to_string())?;
    let after = threads();
    ensure!(after <= before, "loading started {} threads; start them when an instance opens", after - before);
    let exported = root.roles();
    for role in &subject.manifest().roles {
        let known = ["transfer", "tier", "allocator"].contains(&role.kind.as_str());
        ensure!(
            !known || exported.contains(&role.kind.as_str()),
            "the manifest declares the role {}, but export_plugin! names no factory for it",
            role.kind
        );
    }
    Ok(())
}

fn lifecycle(subject: &Subject) -> Outcome {
    leaves_nothing(subject, "shut down and dropped", Instance::end)
}

fn dropped(subject: &Subject) -> Outcome {
    leaves_nothing(subject, "dropped without a shutdown", |instance| {
        drop(instance);
        Ok(())
    })
}

/// Opens and ends instances of every role, one after the other, and looks for leftovers. Things that a library keeps, such as a
/// thread for each processor, stop growing after the first uses. Leftovers of instances do not.
fn leaves_nothing(subject: &Subject, how: &str, end: fn(Instance) -> Result<(), String>) -> Outcome {
    // The first instances may set up what the library keeps.
    let (first, second) = (subject.instances("first")?, subject.instances("second")?);
    first.into_iter().chain(second).try_for_each(end)?;
    let mut left = (0, 0);
    for round in 0..=processors().div_ceil(INSTANCES) {
        let before = (threads(), descriptors());
        for number in 0..INSTANCES {
            subject.instances(&format!("instance-{round}-{number}"))?.into_iter().try_for_each(end)?;
        }
        if wait_for(|| (threads() <= before.0 && descriptors() <= before.1).then_some(())).is_some() {
            return Ok(());
        }
        left = (threads().saturating_sub(before.0), descriptors().saturating_sub(before.1));
    }
    let text = format!(
        "{INSTANCES} instances that were {how} left {} threads and {} descriptors behind, and those before them left some, too",
        left.0, left.1
    );
    Err(Stop::Fail(text))
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
