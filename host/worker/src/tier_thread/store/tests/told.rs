//! Messages to operators about a storage tier that panics, fails, or gives impossible answers.

use host_plugin_api::Tag;
use host_plugin_api::abi::open_guarded_tier;
use host_plugins::{LoadedTier, PluginError, Running, Services};

use super::*;
use crate::tier_thread::OffloadTiers;
use crate::{link, told};

/// A fault of the plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Panic(&'static str),
    /// Claims one entry more than there is room for.
    TooMany,
}

/// A plugin behind the guard that catches panics, as a loaded plugin is.
struct Scripted {
    fake: Arc<Fake>,
    act: Arc<Mutex<Option<Act>>>,
}

impl Scripted {
    fn play(&self, method: &str) {
        let act = *self.act.lock().unwrap();
        assert!(!matches!(act, Some(Act::Panic(of)) if of == method), "told to panic in {method}");
    }
}

macro_rules! forward {
    ($($name:ident($($argument:ident: $of:ty),*) -> $out:ty;)*) => {
        $(fn $name(&self, $($argument: $of),*) -> $out {
            self.play(stringify!($name));
            self.fake.$name($($argument),*)
        })*
    };
}

impl StorageTier for Scripted {
    forward! {
        limits() -> TierLimits;
        register(memory: &Memory) -> Result<RegionId>;
        deregister(region: RegionId) -> Result<()>;
        exists(tag: Tag, keys: &[Key]) -> i32;
        get(tag: Tag, pages: &[TierPage]) -> i32;
        put(tag: Tag, pages: &[TierPage]) -> i32;
        delete(tag: Tag, keys: &[Key]) -> i32;
        cancel(tag: Tag) -> i32;
        settled(tag: Tag) -> i32;
        scan(cursor: u64, keys: &mut [Key]) -> Result<Scanned>;
        usage() -> Result<TierUsage>;
        event_fd() -> i32;
        shutdown(deadline: u64) -> Result<()>;
    }
    fn poll(&self, completions: &mut [TierCompletion]) -> i32 {
        self.play("poll");
        match *self.act.lock().unwrap() {
            Some(Act::TooMany) => completions.len() as i32 + 1,
            _ => self.fake.poll(completions),
        }
    }
}

/// A store as a worker has it, and the fault that its plugin is to have.
fn scripted() -> (Store, Arc<Fake>, HostMemory, Arc<Mutex<Option<Act>>>) {
    let (fake, act) = (Arc::new(Fake::default()), Arc::new(Mutex::new(None)));
    let memory = memory();
    let store = Store::open("acme-disk", guarded(&fake, &act), &memory).unwrap();
    (store, fake, memory, act)
}

fn guarded(fake: &Arc<Fake>, act: &Arc<Mutex<Option<Act>>>) -> Arc<dyn StorageTier> {
    let scripted = Scripted { fake: fake.clone(), act: act.clone() };
    let object = open_guarded_tier(|_opening| Ok(scripted), "acme-disk".into(), "".into()).into_result();
    let object = object.unwrap_or_else(|_| panic!("the factory cannot fail"));
    Arc::new(LoadedTier::new("acme-disk", object, &Services::of("test.acme-disk").unwrap()).unwrap())
}

/// Takes turns in which the plugin has this fault.
fn plays(act: Act) {
    let (mut store, fake, memory, does) = scripted();
    match act {
        Act::Panic("exists") => ask(&mut store, &memory, READ, 0..1),
        Act::Panic("put") => write(&mut store, &memory, READ, pages(1)),
        _ => read(&mut store, &memory, READ, pages(1)),
    }
    if matches!(act, Act::Panic("delete" | "cancel")) {
        turn(&mut store, &memory);
    }
    *does.lock().unwrap() = Some(act);
    if act == Act::Panic("delete") {
        // The objects that were found have no valid seal, so they are to be removed.
        (0..2).for_each(|page| fake.end(1, page, FOUND));
    }
    if act == Act::Panic("cancel") {
        begin(&mut store, &memory, TierAction::Cancel { tag: READ, tier: 0 });
    }
    turn(&mut store, &memory);
    turn(&mut store, &memory);
}

#[test]
fn what_a_storage_tier_does_wrong_is_told_as_the_page_says() {
    told::listen();
    for method in ["exists", "get", "put", "delete", "poll", "cancel", "event_fd"] {
        let before = told::lines("acme-disk").len();
        plays(Act::Panic(method));
        let lines = told::lines("acme-disk").split_off(before);
        let names = format!("told to panic in {method}");
        assert!(lines.iter().any(|line| line.contains(&names)), "{method}: {lines:?}");
    }
    plays(Act::TooMany);

    let (mut store, fake, memory, _act) = scripted();
    fake.answers.lock().unwrap().push_back(ErrorCode::INVALID_ARGUMENT.0);
    write(&mut store, &memory, TierTag(1), pages(1));
    turn(&mut store, &memory);
    read(&mut store, &memory, READ, pages(2));
    turn(&mut store, &memory);
    fake.end(77, 0, FOUND);
    fake.end(1, 9, FOUND);
    fake.end(1, 0, 7);
    fake.completions.lock().unwrap().push_back(TierCompletion {
        tag: Tag(1),
        page: 1,
        status: FOUND,
        bytes: 3,
    });
    turn(&mut store, &memory);
    *fake.gone.lock().unwrap() = Some(ErrorCode::IO.0);
    turn(&mut store, &memory);

    // Some messages are not lines of the log but errors of calls.
    let act = Arc::new(Mutex::new(Some(Act::Panic("register"))));
    let refused = Store::open("acme-disk", guarded(&fake, &act), &memory).err().unwrap();
    let mut said = vec![refused.to_string()];
    for method in ["limits", "deregister", "shutdown"] {
        let tier = guarded(&Arc::new(Fake::default()), &Arc::new(Mutex::new(Some(Act::Panic(method)))));
        said.push(match method {
            "limits" => {
                let problem = host_plugins::limits::of_tier(&*tier).unwrap_err();
                PluginError::NotReady { plugin: "acme-disk".into(), problem }.to_string()
            }
            "deregister" => {
                let tiers = OffloadTiers { tiers: vec![("acme-disk".into(), tier)] };
                tiers.try_out(&shape()).unwrap_err().to_string()
            }
            _ => {
                let mut running = Running::default();
                running.opened("acme-disk", move |deadline| tier.shutdown(deadline));
                link::stop(running).unwrap_err().to_string()
            }
        });
        assert!(said.last().unwrap().contains(&format!("told to panic in {method}")), "{said:?}");
    }
    said.extend(told::lines("acme-disk"));
    told::compare("### A storage tier", &said);
}
