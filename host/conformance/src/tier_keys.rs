//! Cases about keys that differ in one bit: they are different keys.

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{Key, Tag, TierPage};

use super::bytes::write_at;
use super::tier_world::{BACK, World};
use super::{Case, Outcome, Subject, ensure};

pub(super) const CASES: &[Case] = &[Case {
    name: "tier-keys",
    role: Some("tier"),
    capability: None,
    about: "keys that differ in one of their 32 bytes, whichever, have values of their own",
    run: keys,
}];

/// Bytes of a key.
const BYTES: usize = 32;

/// A key, followed by one key for each of its bytes that differs in this byte only.
fn alike(world: &World) -> Vec<Key> {
    let first = world.key(0);
    let other = |at: usize| {
        let mut key = first;
        // Changes the lowest bit of even bytes and the highest bit of odd ones.
        key.0[at] ^= if at.is_multiple_of(2) { 1 } else { 0x80 };
        key
    };
    std::iter::once(first).chain((0..BYTES).map(other)).collect()
}

/// The value that is stored under the key of this number.
fn value(world: &World, number: usize) -> Vec<u8> {
    vec![number as u8 + 1; world.page as usize]
}

fn keys(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let (keys, each) = (alike(&world), world.batch as usize);
    let page = world.page as usize;
    let place = |base: u64, keys: &[Key]| -> Vec<TierPage> {
        let pages = world.pages(world.batch, base).into_iter();
        keys.iter().zip(pages).map(|(key, page)| TierPage { key: *key, ..page }).collect()
    };
    let mut tag = 0;
    let mut next = || {
        tag += 1;
        tag
    };
    for (part, some) in keys.chunks(each).enumerate() {
        for at in 0..some.len() {
            write_at(&world.memory, at * page, &value(&world, part * each + at));
        }
        let (tag, pages) = (next(), place(0, some));
        world.all("put", tag, pages.len() as u32, STORED, || world.tier.put(Tag(tag), &pages))?;
    }
    for (part, some) in keys.chunks(each).enumerate() {
        let (tag, pages) = (next(), place(BACK, some));
        world.all("get", tag, pages.len() as u32, FOUND, || world.tier.get(Tag(tag), &pages))?;
        let back = world.back();
        for (at, found) in back.chunks(page).take(some.len()).enumerate() {
            let number = part * each + at;
            ensure!(
                found == value(&world, number),
                "a get of {} found the value of another key: the two differ in one byte",
                named(number)
            );
        }
    }
    // Deleting one key must delete no other.
    let tag = next();
    world.all("delete", tag, 1, FOUND, || world.tier.delete(Tag(tag), &keys[..1]))?;
    let tag = next();
    world.all("exists of a deleted key", tag, 1, MISSING, || world.tier.exists(Tag(tag), &keys[..1]))?;
    for some in keys[1..].chunks(each) {
        let (tag, count) = (next(), some.len() as u32);
        let what = "exists of keys that differ in one byte from a deleted one";
        world.all(what, tag, count, FOUND, || world.tier.exists(Tag(tag), some))?;
        let tag = next();
        world.all("delete", tag, count, FOUND, || world.tier.delete(Tag(tag), some))?;
    }
    Ok(())
}

fn named(number: usize) -> String {
    match number.checked_sub(1) {
        None => "a key".to_owned(),
        Some(at) => format!("a key whose byte {at} is another"),
    }
}
