//! Ceilings of this machine, to be measured in the same run as what is compared with them.

use std::hint::black_box;
use std::time::Instant;

/// Bytes read: far more than any cache holds.
const READ_BYTES: usize = 512 << 20;

/// Bytes per second that `threads` threads read from memory together.
pub fn memory_read(threads: usize) -> f64 {
    let words = vec![1_u64; READ_BYTES / 8];
    let part = words.len().div_ceil(threads.max(1));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for piece in words.chunks(part) {
            scope.spawn(move || {
                // Eight sums in flight, so that the loop waits for memory and not for additions.
                let sums = piece.chunks_exact(8).fold([0_u64; 8], |mut sums, chunk| {
                    for (sum, word) in sums.iter_mut().zip(chunk) {
                        *sum = sum.wrapping_add(*word);
                    }
                    sums
                });
                black_box(sums)
            });
        }
    });
    READ_BYTES as f64 / begun.elapsed().as_secs_f64()
}
