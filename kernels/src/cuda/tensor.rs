//! The math of a model in bf16 on tensor cores.

pub mod attention;
mod launch;
mod pool;
pub mod rows;
