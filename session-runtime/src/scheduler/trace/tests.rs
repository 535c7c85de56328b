//! The file of a trace: what is written is read, what is torn is not, and what is not a trace is refused.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use std::path::Path;

use proptest::prelude::*;

use super::file::{frame, head};
use super::record::*;
use super::writer::Writer;
use super::*;

fn header() -> TraceHeader {
    TraceHeader {
        program: "0.1.0".to_owned(),
        model: "m".to_owned(),
        contract: "c".to_owned(),
        shape: TracedShape {
            layers: 2,
            kv_heads: 1,
            head_dim: 64,
            kv_type: "f16".to_owned(),
            windows: vec![(1, 128)],
            page_tokens: 16,
            chunk_tokens: 64,
            page_bytes: 4096,
            pages: 100,
            step_rows: 256,
        },
        options: TracedOptions {
            idle_policy: "lru".to_owned(),
            restore_mode: "cut:1".to_owned(),
            idle_ttl_ms: 1000,
            context_length: 2048,
            save_when_idle: true,
            speculation: "auto".to_owned(),
            share_prefixes: true,
            host_budget_bytes: 1 << 20,
            step_seconds: 0.15,
            quotas: vec![("a".to_owned(), TracedQuota { device_bytes: Some(5), ..TracedQuota::default() })],
            others: TracedQuota { disk_bytes: Some(7), ..TracedQuota::default() },
        },
        device: "d".to_owned(),
        costs: Some(vec![1, 2, 3]),
        began_ns: 77,
    }
}

fn records() -> Vec<Record> {
    let open = Cause::Open {
        id: "s".to_owned(),
        tenant: Some("a".to_owned()),
        tokens: (0..500).map(|place| place * 31).collect(),
        saved_under: Some(vec!["rope".to_owned()]),
        idle_ttl_ms: None,
        codec: "raw".to_owned(),
        reuse: "exact".to_owned(),
        layout: Some("head-major-kv-f16-1".to_owned()),
    };
    let told = Told {
        times_ns: vec![1, 1 << 40],
        asked: 9,
        has: vec![255, 1],
        disk_limit: Some(None),
        guess: Some((0, 3, 2)),
        tokens: vec![(0, Taken::Token(5)), (0, Taken::Last(6))],
        ..Told::default()
    };
    let effects = vec![Effect::Started { session: 0, input: 500, cached: 64 }];
    let record = |cause, told, effects| Record { after_ns: 1000, cause, told, effects };
    vec![
        record(open, Told::default(), Vec::new()),
        record(Cause::Turn, told, effects),
        record(Cause::Saved { refused: Some("full".to_owned()) }, Told::default(), Vec::new()),
        record(Cause::Stop, Told::default(), Vec::new()),
    ]
}

/// A trace, and where each of its records ends.
fn written() -> (Vec<u8>, Vec<usize>) {
    let mut bytes = head();
    frame(&header(), &mut bytes).unwrap();
    let mut ends = vec![bytes.len()];
    for record in records() {
        frame(&record, &mut bytes).unwrap();
        ends.push(bytes.len());
    }
    (bytes, ends)
}

fn reader(bytes: &[u8]) -> Result<TraceReader<&[u8]>, Error> {
    TraceReader::new(bytes, bytes.len() as u64, "t")
}

fn read(bytes: &[u8]) -> (Vec<Record>, TraceEnd) {
    let mut trace = reader(bytes).unwrap();
    let records = std::iter::from_fn(|| trace.next_record()).collect();
    (records, trace.end())
}

#[test]
fn what_is_written_is_read() {
    let (bytes, _) = written();
    assert_eq!(reader(&bytes).unwrap().header(), &header());
    assert_eq!(read(&bytes), (records(), TraceEnd::Stopped));
}

#[test]
fn a_torn_trace_is_read_to_its_last_whole_record() {
    let (bytes, ends) = written();
    for length in ends[0]..bytes.len() {
        let whole = ends.iter().filter(|end| **end <= length).count() - 1;
        let left = (length - ends[whole]) as u64;
        let end = if left == 0 { TraceEnd::Open } else { TraceEnd::Cut { bytes: left } };
        assert_eq!(read(&bytes[..length]), (records()[..whole].to_vec(), end), "{length} bytes");
    }
}

#[test]
fn a_record_that_was_damaged_ends_the_trace() {
    let (mut bytes, ends) = written();
    bytes[ends[1] - 1] ^= 1;
    let left = (bytes.len() - ends[0]) as u64;
    assert_eq!(read(&bytes), (Vec::new(), TraceEnd::Cut { bytes: left }));
}

#[test]
fn what_is_not_a_trace_is_refused_with_the_fix() {
    let refused = |bytes: &[u8]| reader(bytes).err().unwrap();
    let (bytes, ends) = written();
    for strange in [&b""[..], b"SESTR", b"GGUF\x03\0\0\0\0\0\0\0\0\0", &bytes[..10]] {
        let error = refused(strange);
        assert_eq!(error.code, "trace_invalid");
        assert!(error.message.contains("--trace"), "{error}");
    }
    assert!(refused(&bytes[..ends[0] - 1]).message.contains("record it again"));
    let mut newer = bytes.clone();
    newer[8] += 1;
    let error = refused(&newer);
    assert_eq!(error.code, "trace_newer");
    assert!(
        error.message.contains("version 3") && error.message.contains("the program that wrote it"),
        "{error}"
    );
    let missing = TraceReader::open(Path::new("no/such/trace")).err().unwrap();
    assert_eq!(missing.code, "trace_unreadable");
    assert!(missing.message.contains("no/such/trace"));
}

#[test]
fn a_length_that_is_not_there_takes_no_memory() {
    let (mut bytes, ends) = written();
    bytes.truncate(ends[0]);
    bytes.extend(u32::MAX.to_le_bytes());
    bytes.extend([0; 40]);
    // Four gigabytes are said to follow.
    assert_eq!(read(&bytes), (Vec::new(), TraceEnd::Cut { bytes: 44 }));
}

/// Writes the trace in a file anew, with its records changed.
pub(in crate::scheduler) fn change(path: &Path, mut change: impl FnMut(&mut Record)) {
    let mut trace = TraceReader::open(path).unwrap();
    let mut bytes = head();
    frame(trace.header(), &mut bytes).unwrap();
    while let Some(mut record) = trace.next_record() {
        change(&mut record);
        frame(&record, &mut bytes).unwrap();
    }
    std::fs::write(path, bytes).unwrap();
}

/// A file that takes so many bytes.
#[derive(Clone, Default)]
struct Full {
    taken: Arc<Mutex<Vec<u8>>>,
    room: usize,
}

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut taken = self.taken.lock().unwrap();
        let left = self.room.saturating_sub(taken.len()).min(bytes.len());
        if left == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        taken.extend(&bytes[..left]);
        Ok(left)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_ends_the_trace_and_nothing_else() {
    let (bytes, ends) = written();
    let file = Full { room: ends[2] + 5, ..Full::default() };
    let mut writer = Writer::start(file.clone(), Duration::ZERO).unwrap();
    let mut now = Duration::ZERO;
    let mut goes_on = true;
    let mut parts = ends.windows(2).map(|ends| &bytes[ends[0]..ends[1]]);
    writer.gathered().extend(&bytes[..ends[0]]);
    while goes_on {
        now += Duration::from_secs(1);
        writer.gathered().extend(parts.next().unwrap_or(&[0; 9]));
        goes_on = writer.pass_on(now);
        std::thread::yield_now();
    }
    drop(writer);
    let taken = file.taken.lock().unwrap().clone();
    let (records, end) = read(&taken);
    assert_eq!((records.len(), end), (2, TraceEnd::Cut { bytes: 5 }));
}

#[test]
fn everything_is_written_when_the_writer_goes() {
    let file = Full { room: usize::MAX, ..Full::default() };
    let mut writer = Writer::start(file.clone(), Duration::ZERO).unwrap();
    writer.gathered().extend([1, 2, 3]);
    assert!(writer.pass_on(Duration::ZERO), "nothing is due");
    drop(writer);
    assert_eq!(*file.taken.lock().unwrap(), [1, 2, 3]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever bytes there are, reading ends, without a panic.
    #[test]
    fn any_bytes_are_read_to_an_end(noise in prop::collection::vec(any::<u8>(), 0..600), after_header: bool) {
        let (whole, ends) = written();
        let mut bytes = if after_header { whole[..ends[0]].to_vec() } else { head() };
        bytes.extend(noise);
        if let Ok(mut trace) = reader(&bytes) {
            while trace.next_record().is_some() {}
            prop_assert!(trace.records <= bytes.len() as u64 / 8);
        }
    }

    /// Records whose bytes are wrong and whose checksum is right: they may read as something, and never as more than they hold.
    #[test]
    fn payloads_of_any_bytes_take_little_memory(payload in prop::collection::vec(any::<u8>(), 0..200)) {
        let (whole, ends) = written();
        let mut bytes = whole[..ends[0]].to_vec();
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(crc32c::crc32c(&payload).to_le_bytes());
        bytes.extend(&payload);
        let (records, _) = read(&bytes);
        for record in records {
            let again = postcard::to_allocvec(&record).unwrap();
            prop_assert!(again.len() <= payload.len(), "{} of {}", again.len(), payload.len());
        }
    }

    /// One bit turned over anywhere: what is read is what was written, up to there.
    #[test]
    fn a_bit_turned_over_is_found(at in 0_usize..4000, bit in 0_u8..8) {
        let (mut bytes, ends) = written();
        let at = ends[0] + at % (bytes.len() - ends[0]);
        bytes[at] ^= 1 << bit;
        let (read, end) = read(&bytes);
        let before = ends.iter().filter(|end| **end <= at).count() - 1;
        prop_assert_eq!(&read[..], &records()[..before]);
        prop_assert!(matches!(end, TraceEnd::Cut { .. }), "{:?}", end);
    }
}
