//! The math of a decoder on tensor cores, for weights of 16 bits.

pub mod linear;
