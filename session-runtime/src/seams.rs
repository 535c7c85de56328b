//! Where a runtime's files and times come from: tests put others in their place and see what happens when those fail.

use std::sync::Arc;

use store::{Clock, Disk, Failpoints, RealDisk, SystemClock};

/// The disk and the clock under a runtime, and where its store fails, stops or waits. The default is the machine's own.
#[derive(Clone)]
pub struct Seams {
    /// Every file of the data directory, the index excepted: [`RealDisk`] or what wraps it.
    pub disk: Arc<dyn Disk>,
    /// Wall and monotonic time.
    pub clock: Arc<dyn Clock>,
    /// Armed fail points of the store. `None` reads the environment.
    pub failpoints: Option<Failpoints>,
}

impl Default for Seams {
    fn default() -> Self {
        Self { disk: Arc::new(RealDisk), clock: Arc::new(SystemClock::default()), failpoints: None }
    }
}
