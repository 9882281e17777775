//! Fixtures shared by the tests.

pub mod model;
