//! Zeroed, cache-line aligned memory for weights, activations and pages.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::error::KernelError;

/// Types for which all-zero bytes are a value and every byte counts.
///
/// # Safety
/// Implemented only for numbers without padding or invalid values.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: plain numbers.
unsafe impl Plain for f32 {}
// SAFETY: plain numbers.
unsafe impl Plain for u32 {}
// SAFETY: plain numbers.
unsafe impl Plain for u16 {}
// SAFETY: plain numbers.
unsafe impl Plain for u8 {}

/// Alignment of every buffer, one cache line.
const ALIGN: usize = 64;

/// An owned slice of numbers, zeroed at birth. Untouched pages of a large buffer cost no memory.
pub(crate) struct Buffer<T: Plain> {
    start: NonNull<T>,
    len: usize,
}

impl<T: Plain> Buffer<T> {
    /// Allocates `len` zeros for `what`.
    pub(crate) fn zeroed(what: &str, len: usize) -> Result<Self, KernelError> {
        let refused = |bytes| KernelError::OutOfMemory { what: what.to_string(), bytes };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| refused(usize::MAX))?;
        if bytes == 0 {
            return Ok(Self { start: NonNull::dangling(), len: 0 });
        }
        let layout = Layout::from_size_align(bytes, ALIGN).map_err(|_| refused(bytes))?;
        // SAFETY: the layout has a size above zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }.cast()).ok_or_else(|| refused(bytes))?;
        Ok(Self { start, len })
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        if let (true, Ok(layout)) = (self.len > 0, Layout::from_size_align(self.len * size_of::<T>(), ALIGN))
        {
            // SAFETY: allocated in `zeroed` with this very layout.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) }
        }
    }
}

impl<T: Plain> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` values, initialised as zeros, owned by this buffer (or none, dangling).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

// SAFETY: owns its memory, plain numbers.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: shared access only reads.
unsafe impl<T: Plain> Sync for Buffer<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_zeroed_aligned_and_refuses_the_impossible() {
        let buffer = Buffer::<f32>::zeroed("test", 1000).unwrap();
        assert!(buffer.iter().all(|v| v.to_bits() == 0));
        assert_eq!(buffer.as_ptr() as usize % ALIGN, 0);
        assert!(Buffer::<f32>::zeroed("test", 0).unwrap().is_empty());
        for len in [usize::MAX, isize::MAX as usize / 4 - 8] {
            assert!(matches!(Buffer::<f32>::zeroed("test", len), Err(KernelError::OutOfMemory { .. })));
        }
    }
}
