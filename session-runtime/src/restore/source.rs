//! The tiers that cells are loaded from. They bring cells beside each other and beside compute.

use std::ops::{Index, IndexMut};

use super::cost::LoadCost;

/// A tier below the device, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Host memory.
    Host,
    /// Packs on disk.
    Disk,
}

impl Source {
    /// Every tier below the device, the best first.
    pub const ALL: [Self; 2] = [Self::Host, Self::Disk];
}

/// Something of each tier below the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerSource<T> {
    /// Of host memory.
    pub host: T,
    /// Of the disk.
    pub disk: T,
}

impl<T> Index<Source> for PerSource<T> {
    type Output = T;

    fn index(&self, source: Source) -> &T {
        match source {
            Source::Host => &self.host,
            Source::Disk => &self.disk,
        }
    }
}

impl<T> IndexMut<Source> for PerSource<T> {
    fn index_mut(&mut self, source: Source) -> &mut T {
        match source {
            Source::Host => &mut self.host,
            Source::Disk => &mut self.disk,
        }
    }
}

/// Cells, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Number of cells.
    pub cells: usize,
    /// Bytes of them.
    pub bytes: usize,
}

impl PerSource<Amount> {
    /// Counts `cells` more cells of `bytes` bytes each.
    pub fn add(&mut self, source: Source, cells: usize, bytes: usize) {
        self[source].cells += cells;
        self[source].bytes += cells * bytes;
    }

    /// These and those.
    #[must_use]
    pub fn and(mut self, others: &Self) -> Self {
        for source in Source::ALL {
            self[source].cells += others[source].cells;
            self[source].bytes += others[source].bytes;
        }
        self
    }

    /// Counts `cells` cells of `bytes` bytes each less.
    pub fn take(&mut self, source: Source, cells: usize, bytes: usize) {
        self[source].cells -= cells;
        self[source].bytes -= cells * bytes;
    }
}

impl PerSource<LoadCost> {
    /// Predicted seconds until every tier has brought its cells.
    pub fn seconds(&self, amounts: &PerSource<Amount>) -> f64 {
        let seconds = |source| LoadCost::seconds(&self[source], amounts[source].cells, amounts[source].bytes);
        seconds(Source::Host).max(seconds(Source::Disk))
    }
}
