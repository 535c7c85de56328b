//! Walking a log file: good frames in order, damage by range, and what a torn write left at the end.

use std::io;

use super::{FILE_HEADER, FRAME_HEADER, Frame, MARKER, Salt, frame_len, read_frame};
use crate::disk::DiskFile;

/// Bytes read at a time.
const WINDOW: usize = 1 << 20;

/// A damaged range of a file, with good frames behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gap {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// What a scan found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Scan {
    /// End of the last good frame (at least the start of the scan).
    pub(crate) end: u64,
    /// Length of the file.
    pub(crate) len: u64,
    /// Damage in the middle.
    pub(crate) gaps: Vec<Gap>,
    /// Where the group of the last good frame starts.
    pub(crate) last_group: u64,
}

impl Scan {
    /// Where the last group is torn, if it is: its frames were written and not synced, so any part of them may be
    /// missing. `known` is where what is known to be durable ends.
    pub(crate) fn torn_group(&self, known: u64) -> Option<u64> {
        self.gaps.iter().map(|gap| gap.start).find(|start| *start >= self.last_group.max(known))
    }
}

/// Reads frames through a window.
pub(crate) struct FrameReader<'a> {
    file: &'a dyn DiskFile,
    salt: Salt,
    window: Vec<u8>,
    start: u64,
    /// The window reaches the end of the file.
    at_end: bool,
}

impl<'a> FrameReader<'a> {
    pub(crate) fn new(file: &'a dyn DiskFile, salt: Salt) -> Self {
        Self { file, salt, window: Vec::new(), start: 0, at_end: false }
    }

    /// Up to `len` bytes at `offset`; fewer at the end of the file.
    fn bytes(&mut self, offset: u64, len: usize, ahead: usize) -> io::Result<&[u8]> {
        let window_end = self.start + self.window.len() as u64;
        let inside = (self.start..=window_end).contains(&offset);
        if !inside || (offset + len as u64 > window_end && !self.at_end) {
            self.window.resize(len.max(ahead), 0);
            let got = self.file.read_at(offset, &mut self.window)?;
            self.at_end = got < self.window.len();
            self.window.truncate(got);
            self.start = offset;
        }
        let at = (offset - self.start) as usize;
        let end = (at + len).min(self.window.len());
        Ok(&self.window[at.min(end)..end])
    }

    /// The body of the frame at `offset`, or `None` if there is no good frame.
    pub(crate) fn frame(&mut self, offset: u64) -> io::Result<Option<&[u8]>> {
        Ok(self.frame_ahead(offset, 4096)?.map(|frame| frame.body))
    }

    fn frame_ahead(&mut self, offset: u64, ahead: usize) -> io::Result<Option<Frame<'_>>> {
        let salt = self.salt;
        let Some(len) = frame_len(&salt, offset, self.bytes(offset, FRAME_HEADER, ahead.max(FRAME_HEADER))?)
        else {
            return Ok(None);
        };
        let frame = self.bytes(offset, FRAME_HEADER + len, ahead)?;
        Ok(read_frame(&salt, offset, frame))
    }

    /// Where the next good frame at or after `offset` starts.
    fn resync(&mut self, mut offset: u64, len: u64) -> io::Result<Option<u64>> {
        while offset + FRAME_HEADER as u64 <= len {
            let bytes = self.bytes(offset, WINDOW, WINDOW)?;
            let Some(at) = bytes.windows(MARKER.len()).position(|w| w == MARKER) else {
                let walked = bytes.len().saturating_sub(MARKER.len() - 1).max(1);
                offset += walked as u64;
                continue;
            };
            offset += at as u64;
            if self.frame_ahead(offset, WINDOW)?.is_some() {
                return Ok(Some(offset));
            }
            offset += 1;
        }
        Ok(None)
    }
}

/// Takes a frame's offset and body.
pub(crate) type Visit<'a, E> = &'a mut dyn FnMut(u64, &[u8]) -> Result<(), E>;

/// Visits every good frame of a file from `from` on, with its offset and body.
///
/// # Errors
/// Reading errors, and whatever `visit` returns.
pub(crate) fn scan<E: From<io::Error>>(
    file: &dyn DiskFile,
    salt: Salt,
    from: u64,
    visit: Visit<'_, E>,
) -> Result<Scan, E> {
    let len = file.len()?;
    let mut reader = FrameReader::new(file, salt);
    let mut at = from.max(FILE_HEADER);
    let mut found = Scan { end: at, len, ..Scan::default() };
    while at < len {
        if let Some(frame) = reader.frame_ahead(at, WINDOW)? {
            visit(at, frame.body)?;
            found.last_group = frame.group;
            at += (FRAME_HEADER + frame.body.len()) as u64;
            found.end = at;
        } else if let Some(next) = reader.resync(at + 1, len)? {
            found.gaps.push(Gap { start: at, end: next });
            at = next;
        } else {
            break;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::push_frame;
    use super::*;
    use crate::disk::{Disk, SimDisk};
    use std::path::Path;
    use std::sync::Arc;

    fn file_of(bodies: &[Vec<u8>], salt: &Salt) -> (Arc<dyn DiskFile>, Vec<u64>) {
        let disk = SimDisk::new();
        disk.create_dir(Path::new("/d")).unwrap();
        let file = disk.create(Path::new("/d/f")).unwrap();
        let (mut bytes, mut starts) = (vec![0; FILE_HEADER as usize], Vec::new());
        for body in bodies {
            starts.push(bytes.len() as u64);
            let at = bytes.len() as u64;
            push_frame(&mut bytes, salt, at, at, body);
        }
        file.write_at(0, &bytes).unwrap();
        (file, starts)
    }

    fn collect(file: &dyn DiskFile, salt: Salt) -> (Scan, Vec<(u64, Vec<u8>)>) {
        let mut seen = Vec::new();
        let found = scan::<io::Error>(file, salt, 0, &mut |at, body| {
            seen.push((at, body.to_vec()));
            Ok(())
        })
        .unwrap();
        (found, seen)
    }

    #[test]
    fn every_truncation_yields_a_prefix_and_every_flip_loses_only_its_frame() {
        let salt = Salt::new(7, 1, 3);
        let bodies: Vec<Vec<u8>> = (0..6u8).map(|i| vec![i; 10 + i as usize * 7]).collect();
        let (file, starts) = file_of(&bodies, &salt);
        let len = file.len().unwrap();
        for bit in (FILE_HEADER * 8)..(len * 8) {
            let mut byte = [0];
            file.read_at(bit / 8, &mut byte).unwrap();
            file.write_at(bit / 8, &[byte[0] ^ 1 << (bit % 8)]).unwrap();
            let hit = starts.iter().rposition(|s| *s <= bit / 8).unwrap();
            let (_, seen) = collect(&*file, salt);
            let want: Vec<_> = (0..6).filter(|i| *i != hit).map(|i| (starts[i], bodies[i].clone())).collect();
            assert_eq!(seen, want, "bit {bit}");
            file.write_at(bit / 8, &byte).unwrap();
        }
        for cut in (FILE_HEADER..len).rev() {
            file.truncate(cut).unwrap();
            let (found, seen) = collect(&*file, salt);
            let whole = starts
                .iter()
                .zip(&bodies)
                .filter(|(s, b)| **s + FRAME_HEADER as u64 + b.len() as u64 <= cut)
                .count();
            assert_eq!((seen.len(), found.gaps.len()), (whole, 0), "cut {cut}");
        }
    }

    #[test]
    fn only_a_hole_in_the_last_group_is_a_torn_group() {
        let gap = |start| Gap { start, end: start + 10 };
        let found = |gaps: &[Gap], last_group| Scan { end: 900, len: 900, gaps: gaps.to_vec(), last_group };
        assert_eq!(found(&[], 100).torn_group(0), None);
        assert_eq!(found(&[gap(200)], 100).torn_group(0), Some(200));
        assert_eq!(
            found(&[gap(100)], 100).torn_group(0),
            Some(100),
            "its first frame may be the missing one"
        );
        assert_eq!(found(&[gap(99)], 100).torn_group(0), None, "the group before was synced");
        assert_eq!(found(&[gap(50), gap(300), gap(400)], 100).torn_group(0), Some(300));
        assert_eq!(
            found(&[gap(200)], 100).torn_group(210),
            None,
            "what is known to be durable cannot be torn"
        );
    }

    #[test]
    fn a_payload_that_imitates_a_frame_is_not_taken_for_one() {
        let salt = Salt::new(7, 1, 3);
        let mut inner = Vec::new();
        push_frame(&mut inner, &salt, FILE_HEADER, FILE_HEADER, b"forged");
        let (file, starts) = file_of(&[inner, b"true".to_vec()], &salt);
        file.write_at(starts[0] + 5, &[0xff]).unwrap();
        let (found, seen) = collect(&*file, salt);
        assert_eq!(seen, vec![(starts[1], b"true".to_vec())]);
        assert_eq!(found.gaps, vec![Gap { start: starts[0], end: starts[1] }]);
    }

    #[test]
    fn the_windows_edge_is_no_edge() {
        let salt = Salt::new(1, 1, 1);
        let bodies: Vec<Vec<u8>> = (0..40u8).map(|i| vec![i; 77_777]).collect();
        let (file, starts) = file_of(&bodies, &salt);
        file.write_at(starts[13] + 100, &[0xff]).unwrap();
        let (found, seen) = collect(&*file, salt);
        assert_eq!(seen.len(), 39);
        assert_eq!(found.gaps, vec![Gap { start: starts[13], end: starts[14] }]);
        assert_eq!(found.end, file.len().unwrap());
    }
}
