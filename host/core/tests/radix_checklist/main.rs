//! Faults that a radix cache must not have, one test each. Several of them occurred in other projects' trees: the comment on the
//! test says where.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should panic")]

mod cache;

use host_core::radix::{Inserted, NamespaceKey, PageHash, Policy, PrefixLock, TreeCounts};

use cache::{Cache, Log, PAGE};

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn lengths_are_whole_pages_and_a_page_aligned_prompt_matches_entirely() {
    let mut cache = Cache::new(8);
    cache.remember(&tokens(0..18));
    for length in 0..20 {
        let lock = cache.lock(&tokens(0..length));
        assert_eq!(lock.pages(), (length as usize).min(16) / PAGE, "{length} tokens");
        assert_eq!(cache.pages(&lock).len(), lock.pages());
        cache.tree.unlock(lock);
        cache.audit();
    }
    cache.drained();
}

#[test]
fn a_prompt_shorter_than_a_page_leaves_the_tree_empty() {
    let mut cache = Cache::new(2);
    let lock = cache.lock(&tokens(0..3));
    let owned = cache.pool.allocate(1).unwrap();
    let Inserted { lock, taken, duplicates, rest } = cache.insert(lock, &tokens(0..3), owned);
    assert_eq!((lock.pages(), taken, duplicates.ids().len(), rest.ids().len()), (0, 0, 0, 1));
    cache.pool.release(duplicates);
    cache.pool.release(rest);
    cache.tree.unlock(lock);
    assert_eq!(cache.tree.counts().pages, 0);
    cache.drained();
}

#[test]
fn incremental_hit_success_swaps_to_the_longer_prefix_and_unlocks_once() {
    let mut cache = Cache::new(8);
    cache.remember(&tokens(0..8));
    let lock = cache.lock(&tokens(0..16));
    assert_eq!((lock.pages(), cache.tree.counts().locked), (2, 2));
    let promised = cache.pages(&lock);
    let owned = cache.pool.allocate(4).unwrap();
    let mut at_commit = cache.insert(lock, &tokens(0..16), owned);
    assert_eq!((at_commit.taken, at_commit.lock.pages(), cache.tree.counts().locked), (2, 4, 4));
    assert_eq!(cache.pages(&at_commit.lock)[..2], promised);
    at_commit.duplicates.append(at_commit.rest);
    let at_end = cache.insert(at_commit.lock, &tokens(0..22), at_commit.duplicates);
    assert_eq!((at_end.taken, at_end.lock.pages(), at_end.rest.ids().len()), (1, 5, 1));
    cache.pool.release(at_end.duplicates);
    cache.pool.release(at_end.rest);
    cache.tree.unlock(at_end.lock);
    cache.audit();
    assert_eq!(cache.cached(&tokens(0..24)), 5);
    cache.drained();
}

#[test]
fn full_hit_success_inserts_nothing_and_keeps_the_lock() {
    let mut cache = Cache::new(8);
    cache.remember(&tokens(0..16));
    let lock = cache.lock(&tokens(0..16));
    let before = cache.tree.counts();
    let none = cache.pool.allocate(0).unwrap();
    let inserted = cache.insert(lock, &tokens(0..16), none);
    assert_eq!((inserted.taken, inserted.lock.pages()), (0, 4));
    assert_eq!(cache.tree.counts(), before);
    cache.pool.release(inserted.duplicates);
    cache.pool.release(inserted.rest);
    cache.tree.unlock(inserted.lock);
    cache.drained();
}

#[test]
fn incremental_hit_failure_frees_only_what_the_request_owns() {
    let mut cache = Cache::new(8);
    cache.remember(&tokens(0..8));
    let lock = cache.lock(&tokens(0..16));
    let owned = cache.pool.allocate(2).unwrap();
    cache.pool.release(owned);
    cache.tree.unlock(lock);
    cache.audit();
    assert_eq!((cache.cached(&tokens(0..16)), cache.pool.counts().held), (2, 0));
    cache.drained();
}

#[test]
fn no_hit_failure_leaves_nothing() {
    let mut cache = Cache::new(8);
    let lock = cache.lock(&tokens(0..16));
    assert_eq!((lock.pages(), cache.tree.counts().locks), (0, 1));
    let owned = cache.pool.allocate(4).unwrap();
    cache.pool.release(owned);
    cache.tree.unlock(lock);
    assert_eq!(cache.tree.counts(), TreeCounts::default());
    cache.drained();
}

#[test]
fn promised_pages_never_change_while_they_are_locked() {
    let mut cache = Cache::new(12);
    cache.remember(&tokens(0..16));
    let lock = cache.lock(&tokens(0..16));
    let promised = cache.pages(&lock);
    let split: Vec<u32> = tokens(0..8).into_iter().chain(100..108).collect();
    cache.remember(&split);
    cache.remember(&tokens(200..216));
    assert_eq!(cache.evict(usize::MAX), 6);
    assert_eq!(cache.pages(&lock), promised);
    cache.tree.unlock(lock);
    cache.drained();
}

#[test]
fn duplicates_come_back_and_the_first_pages_stay() {
    let mut cache = Cache::new(16);
    let first = cache.lock(&tokens(0..16));
    let second = cache.lock(&tokens(0..16));
    let (mine, yours) = (cache.pool.allocate(4).unwrap(), cache.pool.allocate(5).unwrap());
    let (kept, offered) = (mine.ids().to_vec(), yours.ids().to_vec());
    let first = cache.insert(first, &tokens(0..16), mine);
    let longer: Vec<u32> = tokens(0..12).into_iter().chain(50..58).collect();
    let second = cache.insert(second, &longer, yours);
    assert_eq!((second.taken, second.duplicates.ids()), (2, &offered[..3]));
    assert_eq!(cache.pages(&second.lock), [&kept[..3], &offered[3..]].concat());
    for inserted in [first, second] {
        cache.pool.release(inserted.duplicates);
        cache.pool.release(inserted.rest);
        cache.tree.unlock(inserted.lock);
    }
    cache.drained();
}

/// sglang #35270: a shared prefix counted once for each branch.
#[test]
fn shared_pages_are_counted_once_as_evictable_and_as_locked() {
    let mut cache = Cache::new(12);
    let branch = |last: u32| -> Vec<u32> { tokens(0..8).into_iter().chain(last..last + 4).collect() };
    let locks: Vec<PrefixLock> = [100, 200, 300].map(|last| cache.fill(&branch(last))).into();
    assert_eq!((cache.tree.counts().locked, cache.tree.evictable()), (5, 0));
    for (unlocked, lock) in (1..).zip(locks) {
        cache.tree.unlock(lock);
        cache.audit();
        let expected = if unlocked == 3 { 5 } else { unlocked };
        assert_eq!(cache.tree.evictable(), expected);
    }
    cache.drained();
}

/// sglang #32170: a release took pages from the tree that the tree owned, and the protected size went below zero.
#[test]
fn a_request_that_ends_after_insertion_owns_none_of_the_pages_in_the_tree() {
    let mut cache = Cache::new(8);
    let lock = cache.lock(&tokens(0..8));
    let owned = cache.pool.allocate(4).unwrap();
    let in_tree = owned.ids()[..2].to_vec();
    let inserted = cache.insert(lock, &tokens(0..8), owned);
    assert!(inserted.rest.ids().iter().all(|page| !in_tree.contains(page)));
    assert!(inserted.duplicates.ids().is_empty());
    cache.pool.release(inserted.duplicates);
    cache.pool.release(inserted.rest);
    cache.tree.unlock(inserted.lock);
    cache.audit();
    assert_eq!((cache.tree.counts().locked, cache.tree.counts().pages), (0, 2));
    cache.drained();
}

/// mini-sglang #52: locking started at the parent.
#[test]
fn a_lock_keeps_the_node_that_it_names_and_not_only_what_is_above() {
    let mut cache = Cache::new(8);
    cache.remember(&tokens(0..8));
    cache.remember(&tokens(0..16));
    let lock = cache.lock(&tokens(0..16));
    assert_eq!((cache.tree.counts().locked, cache.evict(usize::MAX)), (4, 0));
    assert_eq!(cache.cached(&tokens(0..16)), 4);
    cache.tree.unlock(lock);
    cache.drained();
}

/// bytedance/sglang #508: a match inside a node locked all of it, and unlocking missed the nodes that a later split made.
#[test]
fn a_match_inside_a_node_locks_its_prefix_only_and_unlocks_all_of_it() {
    let mut cache = Cache::new(8);
    cache.remember(&tokens(0..32));
    let short = cache.lock(&tokens(0..12));
    assert_eq!((short.pages(), cache.tree.counts().locked), (3, 3));
    let whole = cache.lock(&tokens(0..32));
    let shorter = cache.lock(&tokens(0..8));
    assert_eq!(cache.tree.counts().locked, 8);
    cache.audit();
    cache.tree.unlock(whole);
    assert_eq!((cache.tree.counts().locked, cache.evict(usize::MAX)), (3, 5));
    cache.tree.unlock(short);
    assert_eq!(cache.tree.counts().locked, 2);
    cache.tree.unlock(shorter);
    cache.drained();
}

/// sglang #38480: a prefix split off while the node was being written back lost the lock, and other bytes were written.
#[test]
fn a_prefix_split_off_a_locked_node_is_locked_too() {
    let mut cache = Cache::new(12);
    let written_back = cache.fill(&tokens(0..16));
    let pages = cache.pages(&written_back);
    let names = cache.tree.page_hashes(&written_back, 0);
    // Two cuts through the locked node, one by a match and one by an insertion.
    let matched = cache.lock(&tokens(0..12));
    cache.tree.unlock(matched);
    cache.remember(&[&tokens(0..4)[..], &tokens(70..78)[..]].concat());
    assert_eq!(cache.tree.counts().nodes, 4);
    assert_eq!((cache.tree.counts().locked, cache.evict(usize::MAX)), (4, 2));
    assert_eq!(cache.pages(&written_back), pages);
    assert_eq!(cache.tree.page_hashes(&written_back, 0), names);
    cache.tree.unlock(written_back);
    cache.drained();
}

#[test]
fn the_generated_end_goes_before_the_prompt_and_a_leaf_gives_no_more_than_is_wanted() {
    let mut cache = Cache::new(16);
    let prompt = cache.fill(&tokens(0..16));
    let owned = cache.pool.allocate(4).unwrap();
    let done = cache.insert(prompt, &tokens(0..32), owned);
    cache.pool.release(done.duplicates);
    cache.pool.release(done.rest);
    cache.tree.unlock(done.lock);
    for left in (0..8).rev() {
        assert_eq!(cache.evict(1), 1);
        assert_eq!(cache.cached(&tokens(0..32)), left);
    }
    assert_eq!(cache.evict(1), 0);
    cache.drained();
}

#[test]
fn every_policy_has_its_own_first_victim() {
    // a: used often, long ago. b: used once, a little later. c: never matched, last. d: low priority, in between.
    for (policy, victim) in [(Policy::Lru, 0), (Policy::Lfu, 2), (Policy::Slru, 1), (Policy::Priority, 3)] {
        let mut cache = Cache::with(16, policy);
        let prompts: [Vec<u32>; 4] =
            std::array::from_fn(|number| tokens(number as u32 * 10..number as u32 * 10 + 4));
        for (number, hits) in [(0, 3), (1, 1), (3, 2), (2, 0)] {
            let lock = cache.lock(&prompts[number]);
            let owned = cache.pool.allocate(1).unwrap();
            let priority = if number == 3 { -1 } else { 5 };
            let sink = &mut Log(&mut cache.told);
            let inserted = cache.tree.insert(&mut cache.pool, lock, &prompts[number], owned, priority, sink);
            cache.pool.release(inserted.duplicates);
            cache.pool.release(inserted.rest);
            cache.tree.unlock(inserted.lock);
            for _ in 0..hits {
                let lock = cache.lock(&prompts[number]);
                cache.tree.unlock(lock);
            }
        }
        assert_eq!(cache.evict(1), 1);
        let gone: Vec<usize> = (0..4).filter(|number| cache.cached(&prompts[*number]) == 0).collect();
        assert_eq!(gone, [victim], "{policy:?}");
        assert_eq!(Policy::from_name(policy.as_str()), Some(policy));
        cache.drained();
    }
}

#[test]
fn namespaces_share_nothing_and_their_number_is_limited() {
    let mut cache = Cache::new(8);
    let key = |salt: &str| NamespaceKey { salt: salt.into(), ..NamespaceKey::default() };
    cache.remember(&tokens(0..8));
    let other = cache.tree.namespace(&key("tenant")).unwrap();
    assert_eq!((cache.tree.peek(other, &tokens(0..8)), cache.cached(&tokens(0..8))), (0, 2));
    let before = cache.namespace;
    cache.namespace = other;
    cache.remember(&tokens(0..8));
    let third = cache.tree.namespace(&key("third")).unwrap();
    // A receipt keeps the third namespace, although the namespace holds no page.
    let lock = cache.tree.lock(third, &tokens(0..8));
    assert_eq!(cache.tree.namespace(&key("fourth")), None, "all three are in use");
    cache.tree.unlock(lock);
    // The third namespace is idle now, so a fourth one replaces it. Pages that are still inserted into the third are not kept.
    assert!(cache.tree.namespace(&key("fourth")).is_some());
    let stale = cache.tree.lock(third, &tokens(0..8));
    let owned = cache.pool.allocate(2).unwrap();
    let inserted = cache.insert(stale, &tokens(0..8), owned);
    assert_eq!((inserted.taken, inserted.rest.ids().len()), (0, 2));
    cache.pool.release(inserted.duplicates);
    cache.pool.release(inserted.rest);
    cache.tree.unlock(inserted.lock);
    cache.namespace = cache.tree.namespace(&key("fifth")).unwrap();
    cache.remember(&tokens(0..8));
    assert_eq!(cache.tree.namespace(&key("sixth")), None, "all three hold pages");
    assert_eq!(cache.tree.namespace(&NamespaceKey::default()), Some(before));
    cache.drained();
}

#[test]
fn the_hash_chain_is_the_documented_one_and_names_the_whole_prefix() {
    let mut cache = Cache::new(8);
    let lock = cache.fill(&tokens(0..12));
    let names = cache.tree.page_hashes(&lock, 0);
    // Computed with Python's hashlib: seed = sha256(09 * 32 + three empty parts, each behind its u64 LE length),
    // h = sha256(h + four u32 LE), tokens 0 to 11.
    let expected = [
        "2861c68594229e9b88a3566daba5ebe486f4f5cdbcca965bf19071ad2f05d6f9",
        "74f1517a53975ceb281f66476b5b8b1e4a479ec9aef68affe2564389777d634d",
        "67850b36099a498b7e14d375df9ab497070ff4c5304a2caf773a887f1b5de8a8",
    ];
    assert_eq!(names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>(), expected);
    for known in 0..4 {
        assert_eq!(cache.tree.page_hashes(&lock, known), &names[known..]);
    }
    cache.tree.unlock(lock);
    // Pages that are inserted at the end, in place of evicted pages, and behind a split get their own names.
    assert_eq!(cache.evict(1), 1);
    for other in [[70, 71, 72, 73], [80, 81, 82, 83]] {
        let lock = cache.fill(&[&tokens(0..8)[..], &other].concat());
        assert_eq!(cache.tree.page_hashes(&lock, 2), [names[1].next(&other)]);
        cache.tree.unlock(lock);
        assert_eq!(cache.evict(1), 1);
    }
    // From an empty tree: no node inherits the name of the node that it replaces.
    cache.evict(usize::MAX);
    let short = cache.fill(&tokens(20..28));
    let lock = cache.fill(&tokens(20..32));
    let behind = cache.tree.page_hashes(&lock, 2);
    assert_eq!(behind, cache.tree.page_hashes(&lock, 0)[2..]);
    cache.tree.unlock(short);
    cache.tree.unlock(lock);
    let key = |extra_key: &str, salt: &str| NamespaceKey {
        model: "m".into(),
        extra_key: extra_key.into(),
        salt: salt.into(),
    };
    let identity = PageHash([9; 32]);
    assert_ne!(identity.namespace(&key("ab", "c")), identity.namespace(&key("a", "bc")));
    cache.drained();
}

#[test]
fn events_are_numbered_without_gaps_and_say_what_happened() {
    let mut cache = Cache::new(8);
    cache.remember(&tokens(0..8));
    cache.remember(&tokens(0..12));
    cache.evict(1);
    let kept = cache.lock(&tokens(0..4));
    let flushed = cache.tree.flush(&mut Log(&mut cache.told));
    cache.pool.release_cached(flushed);
    cache.tree.unlock(kept);
    let flushed = cache.tree.flush(&mut Log(&mut cache.told));
    cache.pool.release_cached(flushed);
    let names: Vec<&str> = cache.told.iter().map(|(_, event)| event.split(' ').next().unwrap()).collect();
    assert_eq!(names, ["Stored", "Stored", "Removed", "Removed", "Cleared"]);
    assert!(cache.told[1].1.contains("parent: Some(PageId(0))"), "{:?}", cache.told);
    assert!(cache.told.iter().map(|(sequence, _)| *sequence).eq(1..=5));
    cache.drained();
}
