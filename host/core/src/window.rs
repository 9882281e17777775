//! Windows: models in which some layers see only the newest tokens.
//!
//! Such a model has F layers that attend to every earlier token and S *sliding* ones that attend to the [`tokens`] newest,
//! the position's own included. A page of the pool holds F layers. The KV of a *token page*, the positions
//! `page x page_tokens ..`, therefore has two parts:
//!
//! - The *full part* is exactly one page of the pool, for as long as the sequence lives.
//! - The *window part* is `parts = ceil(S / F)` pages of the pool, only while a later position still sees it. The j-th
//!   sliding layer lies in the (j / F)-th of them, at layer j % F.
//!
//! Both come from the same pool, so the pool need not be divided beforehand: a long prompt has many full parts and the
//! window parts that its window needs. Code that moves or keeps pages sees pages of the pool and need not know which part
//! they are.
//!
//! [`tokens`]: WindowShape::tokens

use std::ops::Range;

use crate::ids::PageId;

/// The size of a window and of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowShape {
    /// Tokens, at least 1, that a sliding layer sees, the newest included.
    pub tokens: u32,
    /// Pages of the pool that the window part of one token page takes: `ceil(S / F)`, at least 1.
    pub parts: u32,
    /// Sliding layers, S, or 0 if no window may be recomputed.
    pub layers: u32,
}

/// Where a worker that computes continues with a sequence of which some parts are there, in token pages.
///
/// If `start == end`, the window that is seen there is there as well. If `start < end`, no window part is used: full parts
/// are there up to `end`, and the positions of `start..end` are recomputed only for the window at `end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// The first token page that is computed.
    pub start: usize,
    /// The first token page whose full part is computed.
    pub end: usize,
}

impl WindowShape {
    /// The shape of layers with a state of `parts` pages, which is computed from the state before and a token.
    ///
    /// The part of a token page holds the state behind the newest of its positions that are computed. A position reads the state
    /// behind the one before it, as if it saw a window of two tokens, and writes its own. A state depends on all positions
    /// before it, so it cannot be [recomputed](Self::recomputed_from) from a part of them.
    #[must_use]
    pub const fn state(parts: u32) -> Self {
        Self { tokens: 2, parts, layers: 0 }
    }

    /// Whether this is the shape of a state.
    #[must_use]
    pub const fn keeps_state(&self) -> bool {
        self.layers == 0
    }

    /// See [`first_live`].
    #[must_use]
    pub const fn first_live(&self, position: usize, page_tokens: usize) -> usize {
        first_live(position, self.tokens as usize, page_tokens)
    }

    /// The first token page whose window part a sequence keeps while its first `computed` positions have KV. It keeps
    /// the parts that the next position sees, and those that the first position of the same page saw. So the cached
    /// pages of the sequence end in a whole window.
    #[must_use]
    pub const fn first_kept(&self, computed: usize, page_tokens: usize) -> usize {
        self.first_live(computed - computed % page_tokens, page_tokens)
    }

    /// Token pages of a prompt whose window parts must be there when the first token of the answer is computed: the least
    /// that prefill sends.
    #[must_use]
    pub fn tail(&self, prompt: usize, page_tokens: usize) -> Range<usize> {
        let end = prompt.div_ceil(page_tokens);
        self.first_live(prompt, page_tokens).min(end)..end
    }

    /// The same, with the parts that the first position of that token's page saw: at most one token page more. Without
    /// these the prompt's last whole page does not end in a whole window, and a request that loses its pages right
    /// after they came would compute all of the prompt again. If the window is a multiple of a page, only one prompt
    /// length in `page_tokens` needs the additional page.
    #[must_use]
    pub fn kept_tail(&self, prompt: usize, page_tokens: usize) -> Range<usize> {
        let end = prompt.div_ceil(page_tokens);
        self.first_kept(prompt, page_tokens).min(end)..end
    }

    /// The token page from which on a sequence is recomputed for the window parts of `first_live(end) .. end`, when
    /// only the full parts of the token pages before `end` are there.
    ///
    /// A layer's output for a position is exact (has the same bits as ever) if its input for the position is exact and the KV
    /// that the position sees is exact. A layer that sees every token finds this KV there, the position's own included,
    /// because full parts are not written again. So its output is exact for all positions for which its input is. A sliding
    /// layer sees W - 1 positions back. So if its input is exact from x on, its output is exact from x + W - 1 on. The
    /// embedding is exact everywhere. Thus, if computing begins at c, the j-th sliding layer gets exact input, and writes
    /// exact KV, from c + (j - 1)(W - 1) on, and all S layers do from c + (S - 1)(W - 1) on. If that is no later than the
    /// first position of `first_live(end)`, all parts from there on are exact as whole pages. So are positions behind `end`,
    /// which see no other parts. The beginning of a sequence is exact in any case: it sees nothing before it.
    #[must_use]
    pub const fn recomputed_from(&self, end: usize, page_tokens: usize) -> usize {
        let exact = self.first_live(end * page_tokens, page_tokens) * page_tokens;
        let blurred = (self.layers as usize).saturating_sub(1) * (self.tokens as usize - 1);
        exact.saturating_sub(blurred) / page_tokens
    }

    /// Where a worker that computes continues, when the full parts of the first `full` token pages can be had, and `has` says
    /// which of these pages have their window part. That is at the end of the longest prefix with a whole window. If a
    /// [recomputed](Self::recomputed_from) window leaves fewer positions to compute, the worker continues behind all `full`
    /// pages instead, with that window.
    #[must_use]
    pub fn reach(&self, full: usize, page_tokens: usize, has: impl Fn(usize) -> bool) -> Reach {
        let recomputed = if self.layers > 0 { self.recomputed_from(full, page_tokens) } else { 0 };
        let first_live = |end: usize| self.first_live(end * page_tokens, page_tokens);
        let (mut end, mut at, mut first) = (full, full, first_live(full));
        // All parts of `at..end` are there.
        while at > first && end >= recomputed {
            at -= 1;
            if !has(at) {
                (end, first) = (at, first_live(at));
            }
        }
        if end < recomputed { Reach { start: recomputed, end: full } } else { Reach { start: end, end } }
    }

    /// Most token pages whose window parts are kept while `tokens` positions (at least one) are computed at once, wherever
    /// they lie: `ceil((W - 1) / page) + 1 + ceil((tokens - 1) / page)`.
    #[must_use]
    pub const fn most_kept(&self, tokens: usize, page_tokens: usize) -> usize {
        (self.tokens as usize - 1).div_ceil(page_tokens) + 1 + (tokens - 1).div_ceil(page_tokens)
    }

    /// The token pages whose window parts are seen by the position behind the first `end` token pages.
    #[must_use]
    pub const fn seen_at(&self, end: usize, page_tokens: usize) -> Range<usize> {
        self.first_live(end * page_tokens, page_tokens)..end
    }

    /// Fewest pages of the pool, for both parts, that a sequence of so many positions needs when they are computed one
    /// by one.
    #[must_use]
    pub const fn least_pages(&self, positions: usize, page_tokens: usize) -> usize {
        let full = positions.div_ceil(page_tokens);
        let kept = self.most_kept(1, page_tokens);
        full + self.parts as usize * if full < kept { full } else { kept }
    }

    /// Positions of the longest sequence that a pool can hold: the most with [`least_pages`](Self::least_pages) in it.
    #[must_use]
    pub const fn most_positions(&self, pages: usize, page_tokens: usize) -> usize {
        let parts = self.parts as usize;
        let kept = self.most_kept(1, page_tokens);
        let full = if pages > (1 + parts) * kept { pages - parts * kept } else { pages / (1 + parts) };
        full * page_tokens
    }
}

/// The token page of the first token that the token at `position` sees with a window of so many tokens: `max(0,
/// position + 1 - window) / page_tokens`.
#[must_use]
pub const fn first_live(position: usize, window: usize, page_tokens: usize) -> usize {
    (position + 1).saturating_sub(window) / page_tokens
}

/// The window parts of a sequence, or nothing for a model without sliding layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WindowPages {
    /// The token page whose part comes first.
    pub first: u32,
    /// [`WindowShape::parts`] pages for each token page from `first` on, in order.
    pub pages: Vec<PageId>,
}

impl WindowPages {
    /// The `part`-th page of a token page's window part, of `parts`. `None` for a token page that is not among these.
    #[must_use]
    pub fn page(&self, token_page: usize, part: usize, parts: usize) -> Option<PageId> {
        let place = token_page.checked_sub(self.first as usize)?;
        self.pages.get(place * parts + part).copied().filter(|_| part < parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_begins_at_the_page_of_its_oldest_token() {
        for window in 1..40 {
            for page in 1..9 {
                for position in 0..200 {
                    let oldest = (position + 1_usize).saturating_sub(window);
                    let first = first_live(position, window, page);
                    assert!(first * page <= oldest && oldest < (first + 1) * page);
                }
            }
        }
    }

    /// `(prompt, window, page tokens, SGLang's tail, ours)` in tokens. A tail is the end of a prompt whose window parts
    /// decode must get. SGLang's tail begins a token earlier, at the oldest token that the prompt's last token saw.
    #[test]
    fn the_tail_of_a_prompt_is_what_its_next_token_sees() {
        let table = [
            (1, 128, 64, 1, 1),
            (127, 128, 64, 127, 127),
            (128, 128, 64, 128, 128),
            (129, 128, 64, 129, 129),
            (1000, 128, 64, 168, 168),
            (1000, 128, 256, 232, 232),
            (1000, 1024, 64, 1000, 1000),
            (8191, 128, 64, 191, 127),
            (8192, 128, 64, 128, 128),
            (8192, 128, 256, 256, 256),
            (8192, 1024, 64, 1024, 1024),
            (8193, 128, 64, 129, 129),
            (8193, 128, 256, 257, 257),
            (8193, 1024, 64, 1025, 1025),
        ];
        for (prompt, tokens, page, sglang, ours) in table {
            let tail = WindowShape { tokens, parts: 1, layers: 1 }.tail(prompt, page);
            assert_eq!(prompt - tail.start * page, ours, "{prompt} {tokens} {page}");
            let start = prompt.saturating_sub(tokens as usize) / page * page;
            assert_eq!(prompt - start, sglang, "{prompt} {tokens} {page}");
            assert!(ours + 1 >= prompt.min(tokens as usize));
        }
    }

    /// `(prompt, window, page tokens, SGLang's tail, ours)` in tokens, with a radix cache on the decode worker: SGLang's tail
    /// begins one window before the prompt's last token, or one page before it if that is longer.
    #[test]
    fn the_kept_tail_of_a_prompt_is_no_longer_than_the_reference() {
        let table = [
            (1000, 128, 64, 168, 168),
            (1000, 128, 256, 488, 488),
            (1000, 1024, 64, 1000, 1000),
            (8192, 128, 64, 192, 128),
            (8192, 128, 256, 512, 256),
            (8192, 1024, 64, 1088, 1024),
            (8193, 128, 64, 129, 129),
            (8193, 128, 256, 257, 257),
            (8193, 1024, 64, 1025, 1025),
        ];
        let whole = [(128, 64), (128, 256), (1024, 64)].into_iter().flat_map(|(tokens, page)| {
            [1, 64, 127, 128, 129].map(|prompt| (prompt, tokens, page, prompt, prompt))
        });
        for (prompt, tokens, page, sglang, ours) in table.into_iter().chain(whole) {
            let tail = WindowShape { tokens, parts: 1, layers: 1 }.kept_tail(prompt, page);
            assert_eq!(prompt - tail.start * page, ours, "{prompt} {tokens} {page}");
            let start = (prompt - 1).saturating_sub(page.max(tokens as usize)) / page * page;
            assert_eq!(prompt - start, sglang, "{prompt} {tokens} {page}");
            assert!(ours <= sglang, "{prompt} {tokens} {page}");
        }
    }

    #[test]
    fn with_the_kept_tail_the_last_whole_page_ends_in_a_whole_window() {
        for (tokens, page) in (1..40).flat_map(|tokens| (1..9).map(move |page| (tokens, page))) {
            let window = WindowShape { tokens, parts: 1, layers: 0 };
            let longer = |prompt: &usize| {
                let (least, kept) = (window.tail(*prompt, page), window.kept_tail(*prompt, page));
                assert!(
                    kept.start <= window.first_live(prompt / page * page, page),
                    "{window:?} {page} {prompt}"
                );
                assert!(kept.end == least.end && kept.start <= least.start && least.start <= kept.start + 1);
                assert!(kept.len() <= window.most_kept(1, page), "no more than what is kept for each token");
                kept.start < least.start
            };
            let aligned = (tokens as usize).is_multiple_of(page);
            let often = (1000..1000 + page).filter(longer).count();
            assert!(often <= if aligned { 1 } else { page - 1 }, "{window:?} {page}: {often}");
        }
    }

    #[test]
    fn no_piece_of_a_sequence_keeps_more_pages_than_the_most() {
        for (tokens, page) in (1..30).flat_map(|tokens| (1..9).map(move |page| (tokens, page))) {
            let window = WindowShape { tokens, parts: 1, layers: 1 };
            for chunk in 1..20 {
                let kept = |start: usize| {
                    let first = window.first_kept(start, page);
                    assert!(first <= window.first_live(start, page));
                    assert!(
                        first <= window.first_live(start / page * page, page),
                        "the page's first position"
                    );
                    (start + chunk).div_ceil(page) - first
                };
                assert_eq!(
                    (0..200).map(kept).max(),
                    Some(window.most_kept(chunk, page)),
                    "{tokens} {page} {chunk}"
                );
            }
        }
    }

    #[test]
    fn the_longest_sequence_of_a_pool_fits_and_a_longer_one_does_not() {
        for (tokens, parts, page) in [(1, 1, 1), (5, 1, 4), (8, 3, 4), (16, 2, 16), (100, 5, 8)] {
            let window = WindowShape { tokens, parts, layers: 1 };
            for pages in 0..300 {
                let most = window.most_positions(pages, page);
                assert!(most == 0 || window.least_pages(most, page) <= pages, "{window:?} {pages}");
                assert!(window.least_pages(most + 1, page) > pages, "{window:?} {pages}");
            }
        }
    }

    /// The first position from which on all sliding layers write exact KV (see [`WindowShape::recomputed_from`]), if
    /// computing begins at `start`. Found layer by layer, by looking at everything that each position sees.
    fn exact_windows(slides: &[bool], window: usize, start: usize, positions: usize) -> Option<usize> {
        let mut exact: Vec<bool> = (0..positions).map(|position| position >= start).collect();
        let mut first_of_all = 0;
        for slides in slides {
            if *slides {
                // The KV that this layer writes is exact where its input is.
                first_of_all = first_of_all.max(exact.iter().position(|exact| *exact)?);
                let sees = |position: usize| (position + 1_usize).saturating_sub(window)..position + 1;
                exact = (0..positions).map(|position| sees(position).all(|seen| exact[seen])).collect();
            }
        }
        Some(first_of_all)
    }

    #[test]
    fn a_recomputed_window_is_exact_from_its_first_page_on_and_not_if_computing_began_a_page_later() {
        for (tokens, page) in
            [1, 2, 3, 5, 8, 13].into_iter().flat_map(|tokens| [1, 2, 4, 7].map(|page| (tokens, page)))
        {
            for layers in 1..6u32 {
                // Full layers anywhere among them make no difference.
                let slides: Vec<bool> = (0..2 * layers).map(|layer| layer % 3 != 1).collect();
                let layers = slides.iter().filter(|slides| **slides).count() as u32;
                let shape = WindowShape { tokens, parts: 1, layers };
                for end in 0..30 {
                    let start = shape.recomputed_from(end, page);
                    let wanted = shape.first_live(end * page, page) * page;
                    let found = |start: usize| exact_windows(&slides, tokens as usize, start * page, 300);
                    assert!(
                        start <= end && found(start).is_some_and(|first| first <= wanted),
                        "{shape:?} {page} {end}"
                    );
                    let later = found(start + 1);
                    assert!(
                        start * page == wanted || later.is_none_or(|first| first > wanted),
                        "{shape:?} {page} {end}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_match_ends_in_the_deepest_whole_window_or_one_to_recompute_if_that_is_less() {
        let mut random = 1_u64;
        let (mut whole, mut recomputed) = (0, 0);
        for (tokens, layers, page) in
            [(1, 1, 4), (5, 1, 4), (8, 2, 4), (8, 7, 4), (3, 3, 16), (40, 2, 16), (8, 0, 4)]
        {
            let shape = WindowShape { tokens, parts: 1, layers };
            for full in 0..40 {
                for likely in [1, 2, 4, 16] {
                    let parts: Vec<bool> = (0..full)
                        .map(|_| {
                            random = random
                                .wrapping_mul(6_364_136_223_846_793_005)
                                .wrapping_add(1_442_695_040_888_963_407);
                            !(random >> 33).is_multiple_of(likely)
                        })
                        .collect();
                    let first = |end: usize| shape.first_live(end * page, page);
                    let deepest = (0..=full).rfind(|end| (first(*end)..*end).all(|at| parts[at])).unwrap();
                    let from = if layers == 0 { 0 } else { shape.recomputed_from(full, page) };
                    let expected = match from > deepest {
                        true => Reach { start: from, end: full },
                        false => Reach { start: deepest, end: deepest },
                    };
                    assert_eq!(
                        shape.reach(full, page, |at| parts[at]),
                        expected,
                        "{shape:?} {page} {parts:?}"
                    );
                    *(if from > deepest { &mut recomputed } else { &mut whole }) += 1;
                }
            }
        }
        assert!(whole > 100 && recomputed > 100, "{whole} {recomputed}");
    }

    #[test]
    fn pages_are_found_by_token_page_and_part() {
        let pages = WindowPages { first: 3, pages: [5, 6, 7, 8].map(PageId).to_vec() };
        assert_eq!(pages.page(3, 0, 2), Some(PageId(5)));
        assert_eq!(pages.page(4, 1, 2), Some(PageId(8)));
        assert_eq!([(2, 0), (5, 0), (3, 2)].map(|(page, part)| pages.page(page, part, 2)), [None; 3]);
    }
}
