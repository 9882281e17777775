//! The math of a model in bf16 on tensor cores.

pub mod attention;
mod launch;
pub mod linear;
mod pool;
pub mod rows;
