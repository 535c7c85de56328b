//! Restoring: choosing for each chunk and layer between loading saved KV and recomputing it.
//!
//! Knows costs, plans and reports; knows no session, no guest and no HTTP.

pub mod cost;
pub mod plan;
pub mod progress;
pub mod report;
pub mod source;
