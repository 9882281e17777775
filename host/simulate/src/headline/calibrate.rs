//! Fitting constants to cells of a baseline row.

use serde::Serialize;

use super::run;
use crate::cluster::Cluster;
use crate::report::Report;
use crate::traffic::Workload;

/// Turns in which all constants are fitted, one after the other.
const TURNS: usize = 3;
/// Halvings of a constant's range in each turn.
const HALVINGS: usize = 9;
/// The relative error below which a cell counts as met.
const CLOSE: f64 = 0.002;

/// A constant that a publication does not give.
pub(crate) struct Free {
    pub name: &'static str,
    pub unit: &'static str,
    /// The range in which it may lie. Both bounds are above zero.
    pub range: [f64; 2],
    /// Sets it in a cluster.
    pub set: fn(&mut Cluster, f64),
    /// The name of the cell that it is fitted to.
    pub cell: &'static str,
    /// The figure of that cell.
    pub figure: fn(&Report) -> f64,
    /// The cell's published value.
    pub published: f64,
    /// Whether the cell grows with it.
    pub grows: bool,
}

/// A constant that was fitted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fitted {
    /// The name of the constant.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// The cell of the baseline row that it was fitted to.
    pub cell: &'static str,
}

/// Fits constants in turns, by halving their ranges on a logarithmic scale.
pub(super) fn calibrate(cluster: &mut Cluster, workload: &Workload, free: &[Free]) -> Vec<Fitted> {
    let mut values: Vec<f64> = free.iter().map(|free| (free.range[0] * free.range[1]).sqrt()).collect();
    free.iter().zip(&values).for_each(|(free, value)| (free.set)(cluster, *value));
    for turn in 0..TURNS {
        for (place, free) in free.iter().enumerate() {
            // Later turns search near the value of the turn before.
            let near = if turn == 0 { f64::INFINITY } else { 1.5 };
            let [mut low, mut high] = free.range;
            (low, high) = (low.max(values[place] / near), high.min(values[place] * near));
            for _ in 0..HALVINGS {
                let middle = (low * high).sqrt();
                (free.set)(cluster, middle);
                values[place] = middle;
                let found = (free.figure)(&run(workload, cluster));
                if (found / free.published - 1.0).abs() < CLOSE {
                    break;
                }
                match (found > free.published) == free.grows {
                    true => high = middle,
                    false => low = middle,
                }
            }
        }
    }
    let fitted = free.iter().zip(values).map(|(free, value)| Fitted {
        name: free.name,
        value,
        unit: free.unit,
        cell: free.cell,
    });
    fitted.collect()
}
