//! Numbers: weight formats, CPU kernels and the [`backend::Backend`] seam.
//!
//! This crate knows tensors, pages and devices. It knows no session, no model file and no policy;
//! block tables and weights reach it as plain slices.
//!
//! Layout: [`formats`] names the storage types of weights, [`cpu`] is the backend that runs on the
//! host's processor, [`cuda`] the one that runs on a GPU, and [`mod@reference`] keeps slow, obvious twins
//! of their kernels under the same names, as the oracles of their tests.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod backend;
mod check;
pub mod codec;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod formats;
pub mod reference;
