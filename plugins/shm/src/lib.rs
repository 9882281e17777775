//! Transfer backend for workers on one machine: one-sided writes through shared memory.
