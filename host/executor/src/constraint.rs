//! Limits on the tokens that some sequences may draw.

use std::borrow::Cow;

use host_core::{Batch, Sequence, Undrawn};

/// Says which tokens may come next. A worker has one constraint for all its sequences. The executor of rank 0 calls it.
pub trait Constraint: Send + Sync {
    /// Called before a batch is computed. The tokens in the batch determine which tokens its sequences may draw, so these can be
    /// worked out during the forward pass. Does not wait.
    fn begins(&self, batch: &Batch);

    /// Whether a sequence is limited.
    fn limits(&self, sequence: &Sequence) -> bool;

    /// The index in `waiting` of a sequence whose allowed tokens are known. `waiting` has all limited sequences of the batch that
    /// have not drawn yet. May wait until one is known. `None` when the batch has waited long enough: these sequences draw in a
    /// later batch.
    fn known(&self, waiting: &[&Sequence]) -> Option<usize>;

    /// Makes the logits of tokens impossible that may not come next in a sequence that is [known](Self::known). The next token
    /// follows the sequence's known tokens and its first `before` drafted tokens, which were drawn. May wait for the tokens that
    /// may follow drafted ones.
    ///
    /// # Errors
    /// Why no token is drawn.
    fn apply(&self, sequence: &Sequence, before: usize, logits: &mut [f32]) -> Result<(), Undrawn>;
}

/// A sequence's logits behind `before` drafted tokens, with its limits applied. This comes before any other use of the logits.
pub(crate) fn limited<'a>(
    constraint: Option<&dyn Constraint>,
    sequence: &Sequence,
    before: usize,
    logits: &'a [f32],
) -> Result<Cow<'a, [f32]>, Undrawn> {
    match constraint.filter(|constraint| constraint.limits(sequence)) {
        None => Ok(Cow::Borrowed(logits)),
        Some(constraint) => {
            let mut logits = logits.to_vec();
            constraint.apply(sequence, before, &mut logits)?;
            Ok(Cow::Owned(logits))
        }
    }
}
