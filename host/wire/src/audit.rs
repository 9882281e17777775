//! The audit log: lines about calls of operators, and about clients and processes that are refused.

/// The target of its lines. A program that logs less than level `info` logs them all the same.
pub const AUDIT: &str = "audit";

/// The target of the spans of requests, whose ids and paths its lines need. They are enabled where the audit log is.
pub const REQUEST: &str = "request";
