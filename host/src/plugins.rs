//! Find, read, check and load plugins.
