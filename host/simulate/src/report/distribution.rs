//! The mean and the percentiles of many values.

use serde::Serialize;

use super::round;

/// The mean and the percentiles of many values. All are zero if there are no values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    /// How many.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// Half are at most this.
    pub p50: f64,
    /// Nine of ten are at most this.
    pub p90: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
    /// The largest.
    pub most: f64,
}

impl Distribution {
    /// The distribution of these values.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        let Some(most) = values.last().copied() else { return Self::default() };
        let percentile = |share: f64| {
            let place = share * (values.len() - 1) as f64;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a place in the list"
            )]
            let below = place as usize;
            let above = (below + 1).min(values.len() - 1);
            round(values[below] + (values[above] - values[below]) * (place - below as f64))
        };
        Self {
            count: values.len(),
            mean: round(values.iter().sum::<f64>() / values.len() as f64),
            p50: percentile(0.5),
            p90: percentile(0.9),
            p99: percentile(0.99),
            most: round(most),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_numpy() {
        // numpy.percentile(range(1, 11), [50, 90, 99])
        let found = Distribution::of((1..=10).rev().map(f64::from).collect());
        let wanted = Distribution { count: 10, mean: 5.5, p50: 5.5, p90: 9.1, p99: 9.91, most: 10.0 };
        assert_eq!(found, wanted);
        assert_eq!(Distribution::of(vec![]), Distribution::default());
    }
}
