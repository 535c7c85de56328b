//! Logical KV: identities, states, reference counts and tables.
//!
//! Invariants of absence: no bytes, no clock, no async, no lock. The physical half (pages on a device,
//! cells in packs) is reached through ids only, so this half runs and is tested alone.

pub mod chunk;
pub mod codec;
pub mod contract;
pub mod pool;
pub mod prefix;
pub mod reuse;
pub mod shape;
pub mod state;
pub mod table;
