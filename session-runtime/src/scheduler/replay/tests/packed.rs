//! Sessions whose cells are packed: a replay has the bytes that they had.

use super::*;
use crate::kv::codec::KvCodec;

/// Records a session with a codec that leaves the device twice.
fn recorded_packed(codec: KvCodec, trace: &Path) -> Seen {
    let setting = setting(IdlePolicyName::Lru, 9);
    let witness = Witness::default();
    let options = options(&setting, trace);
    let mut simulation = Simulation::new(&machine(900), options, Box::new(witness.clone())).unwrap();
    let id: Arc<str> = "packed".into();
    let opening = Box::new(OpenSession { codec, ..OpenSession::default() });
    simulation.worker.command(Command::Open { session: Arc::clone(&id), opening });
    simulation.append(&id, (0..300).collect());
    for _ in 0..2 {
        let mut told = simulation.generate(&id, 4);
        while !matches!(told.try_recv(), Ok(GenerationEvent::Done { .. })) {
            assert_ne!(simulation.step(None), Progress::Stuck);
        }
        simulation.rest(&id, RestReason::EndOfTurn);
        let session = Arc::clone(&id);
        simulation.worker.command(Command::Evict { session, reply: oneshot::channel().0 });
    }
    drop(simulation);
    witness.0.lock().unwrap().clone()
}

#[test]
fn a_packed_session_is_replayed_with_the_bytes_it_had() {
    // Of 303 tokens, 192 in five bits a value of sixteen; the newest as they are.
    let int4 = 192 * TOKEN_BYTES * 5 / 16 + 111 * TOKEN_BYTES;
    for (codec, most) in [(KvCodec::Int4, int4), (KvCodec::Lossless, 300 * TOKEN_BYTES * 9 / 10)] {
        let directory = tempfile::tempdir().unwrap();
        let trace = directory.path().join("trace");
        let seen = recorded_packed(codec, &trace);
        let replay = replayed(&trace, WhatIf::default());
        assert_eq!(replay.divergence, None);
        let loaded = replay.replayed.bytes_from_host + replay.replayed.bytes_from_disk;
        assert_eq!(loaded, seen.bytes_from_host + seen.bytes_from_disk);
        assert!(loaded > 0 && loaded <= most, "{loaded} bytes of packed cells");
    }
}

#[test]
fn cells_packed_without_loss_have_the_bytes_that_a_trace_says() {
    let wrong = |edit: fn(&mut Vec<u32>)| {
        let directory = tempfile::tempdir().unwrap();
        let trace = directory.path().join("trace");
        recorded_packed(KvCodec::Lossless, &trace);
        change(&trace, |record| {
            if !record.told.packed.is_empty() {
                edit(&mut record.told.packed);
            }
        });
        replayed(&trace, WhatIf::default()).divergence.unwrap().what
    };
    let other = wrong(|lengths| lengths[0] += 1);
    assert!(other.contains("bytes"), "{other}");
    let more = wrong(|lengths| lengths.push(7));
    assert!(more.contains("does not pack"), "{more}");
    let fewer = wrong(|lengths| lengths.truncate(lengths.len() - 1));
    assert!(fewer.contains("packs a cell that the trace has not"), "{fewer}");
}
