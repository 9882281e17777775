//! What limits the tokens that some sequences may draw.

use std::borrow::Cow;

use host_core::{Batch, Sequence, Undrawn};

/// Says which tokens may come next. One for all sequences of a worker, which the executor of rank 0 asks.
pub trait Constraint: Send + Sync {
    /// A batch is about to be computed. What its sequences may draw follows from the tokens that are in it, so it can be
    /// worked out beside the forward pass. Does not wait.
    fn begins(&self, batch: &Batch);

    /// Whether a sequence is limited.
    fn limits(&self, sequence: &Sequence) -> bool;

    /// The place of one of these limited sequences of the batch, of which it is known what may follow. They are all that have not drawn
    /// yet. May wait for one. `None` when the batch has waited long enough: these draw in a later one.
    fn known(&self, waiting: &[&Sequence]) -> Option<usize>;

    /// Makes the logits of tokens impossible that may not follow a sequence that is [known](Self::known), or rather its known tokens
    /// and the first `before` drafted ones, which were drawn. May wait for what follows drafted ones.
    ///
    /// # Errors
    /// Why no token is drawn.
    fn apply(&self, sequence: &Sequence, before: usize, logits: &mut [f32]) -> Result<(), Undrawn>;
}

/// A sequence's logits behind so many drafted tokens, within its limits. To come before all that looks at logits.
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
