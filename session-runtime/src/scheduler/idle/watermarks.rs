//! When idle KV leaves ahead of need: from the high mark on, until the low one. The gap between them keeps eviction and
//! restore from taking turns over the same pages.

/// Shares of the device's pages in use.
#[derive(Clone, Copy, Debug)]
pub(in crate::scheduler) struct Watermarks {
    /// Above this share, KV past its soft deadline leaves.
    pub high: f64,
    /// Until no more than this share is in use.
    pub low: f64,
}

impl Default for Watermarks {
    fn default() -> Self {
        Self { high: 0.98, low: 0.95 }
    }
}

impl Watermarks {
    /// Pages to free now, of `total` of which `used` are in use.
    pub(in crate::scheduler) fn excess(&self, used: usize, total: usize) -> usize {
        if used as f64 <= self.high * total as f64 {
            return 0;
        }
        used - (self.low * total as f64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_leaves_between_the_marks() {
        let marks = Watermarks { high: 0.9, low: 0.7 };
        for (used, excess) in [(0, 0), (70, 0), (90, 0), (91, 21), (100, 30)] {
            assert_eq!(marks.excess(used, 100), excess, "{used}");
        }
    }
}
