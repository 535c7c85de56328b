//! Ceilings of this machine, to be measured in the same run as what is compared with them.

use std::hint::black_box;
use std::time::Instant;

use super::lanes::{Kernel, Lanes, Wide, dispatch};
use super::{Isa, best_isa};

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

/// Steps of the loop that measures multiply-adds.
const STEPS: usize = 1 << 21;
/// Sums in flight: enough to hide the latency of an addition.
const SUMS: usize = 10;

/// Products of bytes summed as the kernels sum them, with nothing else to do.
struct MultiplyAdds;

impl Kernel for MultiplyAdds {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let w = l.wide();
        let (codes, values) = (w.load_bytes(&[[3; 32]; 2]), [1, 2, 3, 4]);
        let mut sums = [w.start(0); SUMS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = w.pin(w.add_dot::<false>(*sum, codes, &values));
            }
        }
        let mut out = [[0.0; 8]; 2];
        for sum in sums {
            w.store(w.to_f32(w.total(sum)), &mut out);
            black_box(&out);
        }
    }
}

/// Products of bytes that `threads` threads can add up in a second with the best instructions there are.
pub fn int8_multiply_adds(threads: usize) -> f64 {
    let isa: Isa = best_isa();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| dispatch(isa, MultiplyAdds));
        }
        dispatch(isa, MultiplyAdds);
    });
    (threads.max(1) * STEPS * SUMS * 64) as f64 / begun.elapsed().as_secs_f64()
}
