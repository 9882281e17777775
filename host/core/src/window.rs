//! Models of which some layers see the newest tokens only.
//!
//! Such a model has F layers that attend to every earlier token and S *sliding* ones that attend to the [`tokens`] newest,
//! the position's own included. A page of the pool holds F layers. The KV of a *token page*, the positions
//! `page x page_tokens ..`, therefore has two parts:
//!
//! - the *full part*, exactly one page of the pool, for as long as the sequence lives;
//! - the *window part*, `parts = ceil(S / F)` pages of the pool, only while some position to come still sees it. The j-th
//!   sliding layer lies in the (j / F)-th of them, at layer j % F.
//!
//! Both come from the same pool, so there is nothing to divide beforehand: a long prompt has many full parts and the
//! window parts that its window needs. Everything that moves or keeps pages sees pages of the pool and does not care which
//! part they are.
//!
//! [`tokens`]: WindowShape::tokens

use crate::ids::PageId;

/// What a window costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowShape {
    /// Tokens that a sliding layer sees, the newest included; at least 1.
    pub tokens: u32,
    /// Pages of the pool that the window part of one token page takes, `ceil(S / F)`; at least 1.
    pub parts: u32,
}

impl WindowShape {
    /// See [`first_live`].
    #[must_use]
    pub const fn first_live(&self, position: usize, page_tokens: usize) -> usize {
        first_live(position, self.tokens as usize, page_tokens)
    }

    /// Token pages whose window part is there while `start..end` is computed: from the first that `start` sees on.
    #[must_use]
    pub fn span(&self, start: usize, end: usize, page_tokens: usize) -> std::ops::Range<usize> {
        let end = end.div_ceil(page_tokens);
        self.first_live(start, page_tokens).min(end)..end
    }

    /// Most token pages that one position sees, wherever in its page it lies: `ceil((tokens - 1) / page_tokens) + 1`.
    #[must_use]
    pub const fn most_live(&self, page_tokens: usize) -> usize {
        (self.tokens as usize - 1).div_ceil(page_tokens) + 1
    }
}

/// The token page of the first token that the one at `position` sees under a window of so many tokens:
/// `max(0, position + 1 - window) / page_tokens`.
#[must_use]
pub const fn first_live(position: usize, window: usize, page_tokens: usize) -> usize {
    (position + 1).saturating_sub(window) / page_tokens
}

/// The window parts of a sequence; empty for a model without sliding layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WindowPages {
    /// The token page whose part comes first.
    pub first: u32,
    /// [`WindowShape::parts`] pages for each token page from `first` on, in order.
    pub pages: Vec<PageId>,
}

impl WindowPages {
    /// The `part`-th page of a token page's window part, of `parts`; `None` for a token page that is not among these.
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

    /// `(prompt, window, page tokens, SGLang's tail, ours)` in tokens: of a prompt, what decode must be sent of the window
    /// parts. SGLang's begins a token earlier, at the oldest one that the prompt's last token saw.
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
            let span = WindowShape { tokens, parts: 1 }.span(prompt, prompt, page);
            assert_eq!(prompt - span.start * page, ours, "{prompt} {tokens} {page}");
            let start = prompt.saturating_sub(tokens as usize) / page * page;
            assert_eq!(prompt - start, sglang, "{prompt} {tokens} {page}");
            assert!(ours + 1 >= prompt.min(tokens as usize));
        }
    }

    #[test]
    fn no_position_sees_more_pages_than_the_most() {
        for (tokens, page) in (1..30).flat_map(|tokens| (1..9).map(move |page| (tokens, page))) {
            let window = WindowShape { tokens, parts: 1 };
            let seen = |at: usize| window.span(at, at + 1, page).len();
            assert_eq!((0..200).map(seen).max(), Some(window.most_live(page)), "{tokens} {page}");
        }
    }

    #[test]
    fn pages_are_found_by_token_page_and_part() {
        let pages = WindowPages { first: 3, pages: [5, 6, 7, 8].map(PageId).to_vec() };
        assert_eq!(pages.page(3, 0, 2), Some(PageId(5)));
        assert_eq!(pages.page(4, 1, 2), Some(PageId(8)));
        assert_eq!([(2, 0), (5, 0), (3, 2)].map(|(page, part)| pages.page(page, part, 2)), [None; 3]);
    }
}
