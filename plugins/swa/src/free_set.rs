//! A set of pages that finds its first and its last member at once.

/// Bits in a word.
const WORD: u32 = u64::BITS;

/// The first level has a bit per page. Each level above has a bit per word that has one set, up to a level of a single
/// word. A call looks at one word per level. A pool of 16 million pages has four levels.
pub struct FreeSet {
    levels: Vec<Vec<u64>>,
    count: u32,
}

impl FreeSet {
    /// The pages below `pages`, all of them.
    pub fn full(pages: u32) -> Self {
        let mut levels = vec![ones(pages)];
        while let Some(words) = levels.last().map(Vec::len).filter(|words| *words > 1) {
            levels.push(ones(u32::try_from(words).unwrap_or(u32::MAX)));
        }
        Self { levels, count: pages }
    }

    /// How many pages there are.
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Adds a page that is not in the set.
    pub fn insert(&mut self, page: u32) {
        let mut place = page;
        for level in &mut self.levels {
            let word = &mut level[(place / WORD) as usize];
            let known = *word != 0;
            *word |= 1 << (place % WORD);
            if known {
                break;
            }
            place /= WORD;
        }
        self.count += 1;
    }

    /// Takes the lowest page out.
    pub fn take_first(&mut self) -> Option<u32> {
        self.take(u64::trailing_zeros)
    }

    /// Takes the highest page out.
    pub fn take_last(&mut self) -> Option<u32> {
        self.take(|word| WORD - 1 - word.leading_zeros())
    }

    fn take(&mut self, bit: impl Fn(u64) -> u32) -> Option<u32> {
        if self.count == 0 {
            return None;
        }
        let down = self.levels.iter().rev();
        let page = down.fold(0, |place, level| place * WORD + bit(level[place as usize]));
        let mut place = page;
        for level in &mut self.levels {
            let word = &mut level[(place / WORD) as usize];
            *word &= !(1 << (place % WORD));
            if *word != 0 {
                break;
            }
            place /= WORD;
        }
        self.count -= 1;
        Some(page)
    }
}

/// Words whose first `bits` bits are set.
fn ones(bits: u32) -> Vec<u64> {
    let mut words = vec![u64::MAX; bits.div_ceil(WORD).max(1) as usize];
    if let Some(last) = words.last_mut().filter(|_| bits == 0 || !bits.is_multiple_of(WORD)) {
        *last = (1 << (bits % WORD)) - 1;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn it_takes_from_both_ends_what_an_ordered_set_does() {
        let mut random = fastrand::Rng::with_seed(7);
        for pages in [0, 1, 63, 64, 65, 4096, 4097, 300_000] {
            let mut set = FreeSet::full(pages);
            let mut model: BTreeSet<u32> = (0..pages).collect();
            let mut out = Vec::new();
            for _ in 0..3000 {
                match random.u8(..8) {
                    0..=2 => {
                        let first = set.take_first();
                        assert_eq!(first, model.pop_first());
                        out.extend(first);
                    }
                    3..=5 => {
                        let last = set.take_last();
                        assert_eq!(last, model.pop_last());
                        out.extend(last);
                    }
                    _ if out.is_empty() => {}
                    _ => {
                        let page = out.swap_remove(random.usize(..out.len()));
                        set.insert(page);
                        model.insert(page);
                    }
                }
                assert_eq!(set.len() as usize, model.len());
            }
        }
    }

    #[test]
    fn an_emptied_set_is_filled_again() {
        let mut set = FreeSet::full(200);
        while set.take_first().is_some() {}
        assert_eq!((set.len(), set.take_last()), (0, None));
        for page in [199, 0, 64] {
            set.insert(page);
        }
        assert_eq!([set.take_first(), set.take_last(), set.take_last()], [Some(0), Some(199), Some(64)]);
    }
}
