//! The watermark: up to where the index on disk is known to be complete.
//!
//! Owns the file `WATERMARK`: two slots of 512 bytes, written in turn, each with a CRC. A torn write destroys the
//! slot being written and never the other one.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::disk::{Disk, DiskFile};
use crate::framed::LogPos;
use crate::meta::keys::le64;

const SLOT: usize = 512;
const MAGIC: &[u8; 8] = b"SRWATERM";
const USED: usize = 64;

/// What a checkpoint made durable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Watermark {
    /// Number of the last group of changes in the index.
    pub(crate) commit: u64,
    /// End of the journal that the index covers.
    pub(crate) journal: LogPos,
    /// End of the metadata log that the index covers.
    pub(crate) metalog: LogPos,
}

/// The file.
pub(crate) struct WatermarkFile {
    file: Arc<dyn DiskFile>,
    path: PathBuf,
    turn: u64,
}

fn encode(mark: &Watermark, turn: u64) -> [u8; SLOT] {
    let mut slot = [0; SLOT];
    slot[..8].copy_from_slice(MAGIC);
    let fields =
        [turn, mark.commit, mark.journal.file, mark.journal.offset, mark.metalog.file, mark.metalog.offset];
    for (i, field) in fields.iter().enumerate() {
        slot[8 + i * 8..16 + i * 8].copy_from_slice(&field.to_le_bytes());
    }
    let sum = crc32c::crc32c(&slot[..USED - 4]);
    slot[USED - 4..USED].copy_from_slice(&sum.to_le_bytes());
    slot
}

fn decode(slot: &[u8]) -> Option<(u64, Watermark)> {
    let used = slot.get(..USED)?;
    if !used.starts_with(MAGIC) || used[USED - 4..] != crc32c::crc32c(&used[..USED - 4]).to_le_bytes() {
        return None;
    }
    let field = |i: usize| le64(used, 8 + i * 8);
    let mark = Watermark {
        commit: field(1)?,
        journal: LogPos { file: field(2)?, offset: field(3)? },
        metalog: LogPos { file: field(4)?, offset: field(5)? },
    };
    Some((field(0)?, mark))
}

impl WatermarkFile {
    /// Opens or makes the file in `dir`; returns the newest good mark.
    pub(crate) fn open(disk: &dyn Disk, dir: &Path) -> io::Result<(Self, Option<Watermark>)> {
        let path = dir.join("WATERMARK");
        let file = match disk.open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let file = disk.create(&path)?;
                file.write_at(0, &[0; 2 * SLOT])?;
                file.sync_data()?;
                disk.sync_dir(dir)?;
                file
            }
            Err(e) => return Err(e),
        };
        let mut bytes = [0; 2 * SLOT];
        let got = file.read_at(0, &mut bytes)?;
        let newest = bytes[..got].chunks(SLOT).filter_map(decode).max_by_key(|(turn, _)| *turn);
        let turn = newest.map_or(0, |(turn, _)| turn);
        Ok((Self { file, path, turn }, newest.map(|(_, mark)| mark)))
    }

    /// Writes a mark over the older slot, durably.
    pub(crate) fn write(&mut self, mark: &Watermark) -> io::Result<()> {
        let turn = self.turn + 1;
        self.file.write_at((turn % 2) * SLOT as u64, &encode(mark, turn))?;
        self.file.sync_data()?;
        self.turn = turn;
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::SimDisk;

    fn mark(n: u64) -> Watermark {
        Watermark {
            commit: n,
            journal: LogPos { file: n, offset: 2 * n },
            metalog: LogPos { file: n + 1, offset: 3 * n },
        }
    }

    #[test]
    fn i6_a_torn_or_flipped_slot_leaves_the_other() {
        let disk = SimDisk::new();
        let dir = Path::new("/d");
        disk.create_dir(dir).unwrap();
        let (mut file, none) = WatermarkFile::open(&disk, dir).unwrap();
        assert_eq!(none, None);
        for n in 1..=5 {
            file.write(&mark(n)).unwrap();
            assert_eq!(WatermarkFile::open(&disk, dir).unwrap().1, Some(mark(n)));
        }
        // The fifth write went to slot 1; damage to it leaves the fourth.
        for bit in 0..(USED as u64 * 8) {
            let at = SLOT as u64 * 8 + bit;
            disk.flip_bit(file.path(), at).unwrap();
            assert_eq!(WatermarkFile::open(&disk, dir).unwrap().1, Some(mark(4)), "bit {bit}");
            disk.flip_bit(file.path(), at).unwrap();
        }
        // A power cut during the sixth write leaves the fifth or the sixth.
        file.file.write_at(0, &encode(&mark(6), 6)).unwrap();
        for seed in 0..16 {
            let (_, found) = WatermarkFile::open(&disk.crash(seed), dir).unwrap();
            assert!(found == Some(mark(5)) || found == Some(mark(6)), "{found:?}");
        }
    }
}
