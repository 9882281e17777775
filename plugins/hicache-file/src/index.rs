//! Which page lies where: the values of each segment in the order of their records, and a table from key to record.
//!
//! A key may have several records, because processes that share a directory do not ask each other. The first record that
//! this process learns of is served, counted and listed. The other records are *copies*: known so that a delete finds them.
//!
//! A record whose bytes could not be read is *suspect* until they are read. It is served on, as the error may pass, but only until
//! there is another record of its key that is not suspect. Then it is a copy.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hashbrown::HashTable;
use host_plugin_api::Key;
use xxhash_rust::xxh3::xxh3_64;

use crate::format::{BLOCK, Value};
use crate::segment::Segment;

/// Most records that are known at once, with gaps between their numbers: a bound on memory, of about 8 GiB.
const MOST_PAGES: usize = 1 << 27;

/// A page that was found.
pub struct Hit {
    pub segment: Arc<Segment>,
    pub number: u32,
    pub value: Value,
    /// Its bytes could not be read, so that a put has to write the page again.
    pub is_suspect: bool,
}

struct Records {
    segment: Arc<Segment>,
    /// Values by number of their record. A removed value has length 0.
    values: Vec<Value>,
    /// Numbers of the records that are copies.
    copies: BTreeSet<u32>,
    /// Numbers of the records whose bytes could not be read, copies among them.
    suspects: BTreeSet<u32>,
    /// Values that are no copies.
    live: usize,
    /// Deleted records that stay on disk until the segment is sealed, because another process writes the segment.
    doomed: Vec<u32>,
}

impl Records {
    fn value(&self, number: u32) -> &Value {
        self.values.get(number as usize).unwrap_or(&NONE)
    }

    fn serves(&self, key: &Key, number: u32) -> bool {
        let value = self.value(number);
        value.length > 0 && value.key == *key && !self.copies.contains(&number)
    }
}

const NONE: Value = Value { key: Key([0; 32]), checksum: 0, block: 0, length: 0 };

/// The index of all segments of a directory. Each record takes 48 bytes for its value and 9 to 18 bytes of the table.
pub struct Index {
    table: HashTable<(u32, u32)>,
    /// How many records of the table are copies.
    copies: usize,
    /// Values of all segments, gaps included.
    slots: usize,
    segments: BTreeMap<u32, Records>,
    last: u32,
    bytes: u64,
    /// Some records on disk are not known yet, and a call for an unknown key should wait.
    pub loading: bool,
    /// All records that were on disk at opening are known.
    pub complete: bool,
}

fn hash(key: &Key) -> u64 {
    xxh3_64(&key.0)
}

/// The hash of the key of this record.
fn hash_at(segments: &BTreeMap<u32, Records>, (segment, number): (u32, u32)) -> u64 {
    hash(&segments.get(&segment).map_or(&NONE, |records| records.value(number)).key)
}

impl Index {
    pub fn new() -> Self {
        Self {
            table: HashTable::new(),
            copies: 0,
            slots: 0,
            segments: BTreeMap::new(),
            last: 0,
            bytes: 0,
            loading: true,
            complete: false,
        }
    }

    /// Number of pages. Copies do not count.
    pub fn len(&self) -> usize {
        self.table.len() - self.copies
    }

    /// Makes room for `pages` more pages, so that the table does not grow again and again.
    pub fn reserve(&mut self, pages: usize) {
        let Self { table, segments, .. } = self;
        table.reserve(pages.min(MOST_PAGES), |place| hash_at(segments, *place));
    }

    /// Pages for which there is room.
    #[cfg(test)]
    pub fn room(&self) -> usize {
        self.table.capacity()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn segments(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.segments.values().map(|records| &records.segment)
    }

    /// Adds a segment, which `make` makes from its number. Numbers are not used twice.
    pub fn add(&mut self, make: impl FnOnce(u32) -> Arc<Segment>) -> Arc<Segment> {
        self.last += 1;
        let segment = make(self.last);
        let records = Records {
            segment: segment.clone(),
            values: Vec::new(),
            copies: BTreeSet::new(),
            suspects: BTreeSet::new(),
            live: 0,
            doomed: Vec::new(),
        };
        self.segments.insert(self.last, records);
        segment
    }

    fn place(&self, key: &Key) -> Option<(u32, u32)> {
        let serves = |&(segment, number): &(u32, u32)| {
            self.segments.get(&segment).is_some_and(|records| records.serves(key, number))
        };
        self.table.find(hash(key), serves).copied()
    }

    pub fn find(&self, key: &Key) -> Option<Hit> {
        let (segment, number) = self.place(key)?;
        let records = self.segments.get(&segment)?;
        let is_suspect = records.suspects.contains(&number);
        Some(Hit { segment: records.segment.clone(), number, value: *records.value(number), is_suspect })
    }

    /// Notes that the bytes of a record could not be read. If it serves its key and a copy is not suspect, the copy serves from now
    /// on. Nothing changes for a record that is gone.
    pub fn suspect(&mut self, key: &Key, segment: u32, number: u32) {
        let Some(records) = self.segments.get_mut(&segment) else { return };
        let value = records.value(number);
        if value.length == 0 || value.key != *key || !records.suspects.insert(number) {
            return;
        }
        let is_good = |&&(segment, number): &&(u32, u32)| {
            self.segments.get(&segment).is_some_and(|records| {
                records.value(number).key == *key
                    && records.copies.contains(&number)
                    && !records.suspects.contains(&number)
            })
        };
        let good = self.table.iter_hash(hash(key)).find(is_good).copied();
        if let Some((segment, number)) = good
            && self.step_back(key)
            && let Some(records) = self.segments.get_mut(&segment)
            && records.copies.remove(&number)
        {
            self.copies -= 1;
            records.live += 1;
            self.bytes += u64::from(records.value(number).length);
        }
    }

    /// Notes that the bytes of a record were read.
    pub fn trust(&mut self, segment: u32, number: u32) {
        if let Some(records) = self.segments.get_mut(&segment) {
            records.suspects.remove(&number);
        }
    }

    /// Makes a copy of the record that serves a key, if it is suspect. Another record serves then.
    fn step_back(&mut self, key: &Key) -> bool {
        if let Some((segment, number)) = self.place(key)
            && let Some(records) = self.segments.get_mut(&segment)
            && records.suspects.contains(&number)
        {
            records.copies.insert(number);
            self.copies += 1;
            records.live -= 1;
            self.bytes -= u64::from(records.value(number).length);
            return true;
        }
        false
    }

    /// Adds a record of a segment that was added. To be called once per record. False when it is a copy, or there is no room.
    pub fn insert(&mut self, segment: u32, number: u32, value: Value) -> bool {
        let Some(records) = self.segments.get(&segment) else { return false };
        // A damaged file may have one record with a large number.
        let more = (number as usize + 1).saturating_sub(records.values.len());
        if self.slots + more > MOST_PAGES {
            return false;
        }
        self.step_back(&value.key);
        let is_copy = self.place(&value.key).is_some();
        let Some(records) = self.segments.get_mut(&segment) else { return false };
        if more > 0 {
            self.slots += more;
            records.values.resize(number as usize + 1, NONE);
        }
        records.values[number as usize] = value;
        if is_copy {
            records.copies.insert(number);
            self.copies += 1;
        } else {
            records.live += 1;
            self.bytes += u64::from(value.length);
        }
        let Self { table, segments, .. } = self;
        let hasher = |place: &(u32, u32)| hash_at(segments, *place);
        table.insert_unique(hash(&value.key), (segment, number), hasher);
        !is_copy
    }

    /// Forgets a record if it still is there.
    pub fn remove(&mut self, key: &Key, segment: u32, number: u32) -> bool {
        let Ok(entry) = self.table.find_entry(hash(key), |place| *place == (segment, number)) else {
            return false;
        };
        entry.remove();
        if let Some(records) = self.segments.get_mut(&segment)
            && let Some(value) = records.values.get_mut(number as usize)
        {
            if records.copies.remove(&number) {
                self.copies -= 1;
            } else {
                self.bytes -= u64::from(value.length);
                records.live -= 1;
            }
            records.suspects.remove(&number);
            *value = NONE;
        }
        true
    }

    /// Forgets all records of a key. Returns their segments and numbers.
    pub fn remove_all(&mut self, key: &Key) -> Vec<(Arc<Segment>, u32)> {
        let of_key = |&&(segment, number): &&(u32, u32)| {
            self.segments.get(&segment).is_some_and(|records| records.value(number).key == *key)
        };
        let places: Vec<(u32, u32)> = self.table.iter_hash(hash(key)).filter(of_key).copied().collect();
        let segment = |&(segment, number): &(u32, u32)| {
            self.segments.get(&segment).map(|records| (records.segment.clone(), number))
        };
        let removed = places.iter().filter_map(segment).collect();
        for (segment, number) in places {
            self.remove(key, segment, number);
        }
        removed
    }

    /// Notes that a record must be removed once its segment is sealed. False when the segment is sealed already, or gone.
    pub fn doom(&mut self, segment: u32, number: u32) -> bool {
        match self.segments.get_mut(&segment) {
            Some(records) if !records.segment.is_sealed() => {
                records.doomed.push(number);
                true
            }
            _ => false,
        }
    }

    /// Takes the records that `doom` noted for a segment that is sealed now.
    pub fn take_doomed(&mut self, segment: u32) -> Vec<u32> {
        self.segments.get_mut(&segment).map(|records| std::mem::take(&mut records.doomed)).unwrap_or_default()
    }

    /// Forgets a segment. Returns how many pages went with it.
    pub fn drop_segment(&mut self, id: u32) -> usize {
        let Some(records) = self.segments.remove(&id) else { return 0 };
        self.slots -= records.values.len();
        for (number, value) in records.values.iter().enumerate().filter(|(_, value)| value.length > 0) {
            let place = (id, number as u32);
            if let Ok(entry) = self.table.find_entry(hash(&value.key), |found| *found == place) {
                entry.remove();
                if records.copies.contains(&place.1) {
                    self.copies -= 1;
                } else {
                    self.bytes -= u64::from(value.length);
                }
            }
        }
        records.live
    }

    /// Writes keys from this place on. Returns how many, and the place after the last, or no place when there are no more. A key whose
    /// record turns out to be unreadable meanwhile may come twice, or not at all.
    pub fn scan(&self, segment: u32, number: u32, keys: &mut [Key]) -> (usize, Option<(u32, u32)>) {
        let mut count = 0;
        for (id, records) in self.segments.range(segment..) {
            let from = if *id == segment { number as usize } else { 0 };
            for (at, value) in records.values.iter().enumerate().skip(from) {
                if value.length == 0 || records.copies.contains(&(at as u32)) {
                    continue;
                }
                if count == keys.len() {
                    return (count, Some((*id, at as u32)));
                }
                keys[count] = value.key;
                count += 1;
            }
        }
        (count, None)
    }

    /// Whether a scan may have stopped at this place.
    pub fn knows_place(&self, segment: u32, number: u32) -> bool {
        segment <= self.last && (number as usize) <= (4096 << 20) / BLOCK as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Name;

    fn value(n: u32) -> Value {
        let mut key = Key::default();
        key.0[..4].copy_from_slice(&n.to_le_bytes());
        Value { key, checksum: 0, block: n, length: 10 }
    }

    #[test]
    fn a_record_that_could_not_be_read_serves_until_there_is_another() {
        let mut index = Index::new();
        let mut add = || index.add(|id| Segment::new(id, Name { birth: 1, random: 1 }, None)).id;
        let (a, b) = (add(), add());
        let page = value(7);
        assert!(index.insert(a, 0, page));
        index.suspect(&page.key, a, 0);
        assert!(index.find(&page.key).is_some_and(|hit| hit.segment.id == a && hit.is_suspect));
        assert!(index.insert(b, 4, page), "the other record serves");
        assert!(index.find(&page.key).is_some_and(|hit| hit.segment.id == b && !hit.is_suspect));
        assert!(!index.insert(b, 5, page), "the first record of the other is suspect, the second is not");
        index.suspect(&page.key, b, 4);
        let serves =
            |index: &Index| index.find(&page.key).map(|hit| (hit.segment.id, hit.number, hit.is_suspect));
        assert_eq!(serves(&index), Some((b, 5, false)), "a copy that is good takes over");
        index.suspect(&page.key, b, 5);
        assert_eq!(serves(&index), Some((b, 5, true)), "none is good");
        index.trust(b, 5);
        assert_eq!(serves(&index), Some((b, 5, false)));
        assert_eq!((index.len(), index.bytes()), (1, 10));
        assert_eq!(index.remove_all(&page.key).len(), 3, "a delete finds all of them");
        assert_eq!((index.len(), index.bytes(), index.copies), (0, 0, 0));
    }

    #[test]
    fn the_table_and_the_segments_agree_whatever_is_added_and_removed() {
        let mut index = Index::new();
        let add = |index: &mut Index| index.add(|id| Segment::new(id, Name { birth: 1, random: 1 }, None)).id;
        let (a, b) = (add(&mut index), add(&mut index));
        for n in 0..1000 {
            assert!(index.insert(a, n, value(n)));
            assert!(!index.insert(b, n, value(n)), "a copy");
        }
        for n in 1000..1500 {
            assert!(index.insert(b, n, value(n)));
        }
        assert_eq!((index.len(), index.bytes()), (1500, 15_000));
        assert!(index.remove(&value(3).key, a, 3) && !index.remove(&value(3).key, a, 3));
        assert!(index.find(&value(3).key).is_none());
        assert_eq!(index.find(&value(1200).key).unwrap().number, 1200);
        assert_eq!(index.drop_segment(a), 999);
        assert_eq!((index.len(), index.bytes(), index.slots), (500, 5000, 1500));
        assert!(!index.insert(b, u32::MAX, value(1)), "a number beyond all bounds");
        assert_eq!(index.slots, 1500);
        assert!((0..1000).all(|n| index.find(&value(n).key).is_none()));
        let copies = (0..1000).filter(|n| n % 2 == 0);
        assert!(
            copies.clone().all(|n| index.remove_all(&value(n).key).len() == 1),
            "copies outlive the first"
        );
        assert!(copies.clone().all(|n| index.insert(b, n, value(n))));
        assert!(copies.clone().all(|n| index.remove_all(&value(n).key).len() == 1));
        assert_eq!((index.len(), index.bytes()), (500, 5000));
        let (mut seen, mut place) = (Vec::new(), Some((0, 0)));
        while let Some((segment, number)) = place {
            let mut keys = [Key::default(); 7];
            let (count, next) = index.scan(segment, number, &mut keys);
            seen.extend_from_slice(&keys[..count]);
            place = next;
        }
        assert_eq!(seen, (1000..1500).map(|n| value(n).key).collect::<Vec<_>>());
    }
}
