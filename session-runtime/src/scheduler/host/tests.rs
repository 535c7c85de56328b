use proptest::prelude::*;

use super::*;
use crate::scheduler::tenants::TenantQuota;

fn id(number: u8) -> ChunkId {
    [number; 32]
}

/// Whose a chunk is.
fn tenant(chunk: u8) -> Tenant {
    Tenant::named(["a", "b"].get(usize::from(chunk % 3)).copied())
}

fn nobody() -> Tenant {
    Tenant::default()
}

/// Bytes that follow from the cell, as content-addressed ones do.
fn bytes(chunk: u8, layer: u32) -> CellBytes {
    Arc::new((0..size(chunk, layer)).map(|at| chunk ^ layer as u8 ^ at as u8).collect())
}

fn size(chunk: u8, layer: u32) -> usize {
    10 + usize::from(chunk % 3) * 7 + layer as usize
}

#[derive(Clone, Debug)]
enum Move {
    Insert { chunk: u8, layers: Vec<u32>, on_disk: bool },
    Claim(u8),
    Release(usize),
    Touch(u8),
    OnDisk(u8, bool),
    Read(u8, u32, TierFault),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let chunk = 0..8_u8;
    let fault = prop_oneof![
        6 => Just(TierFault::None),
        1 => Just(TierFault::FlipBit),
        1 => Just(TierFault::Tear),
        1 => Just(TierFault::Stale),
        1 => Just(TierFault::DropReads),
    ];
    let layers = prop::collection::btree_set(0..4_u32, 0..5).prop_map(|layers| layers.into_iter().collect());
    let one = prop_oneof![
        6 => (chunk.clone(), layers, any::<bool>())
            .prop_map(|(chunk, layers, on_disk)| Move::Insert { chunk, layers, on_disk }),
        2 => chunk.clone().prop_map(Move::Claim),
        2 => (0..16_usize).prop_map(Move::Release),
        1 => chunk.clone().prop_map(Move::Touch),
        2 => (chunk.clone(), any::<bool>()).prop_map(|(chunk, on_disk)| Move::OnDisk(chunk, on_disk)),
        4 => (chunk, 0..4_u32, fault).prop_map(|(chunk, layer, fault)| Move::Read(chunk, layer, fault)),
    ];
    prop::collection::vec(one, 1..120)
}

/// The same tier as a list: the least recently used chunk first.
#[derive(Default)]
struct Model {
    budget: u64,
    quotas: [Option<u64>; 2],
    chunks: Vec<Entry>,
}

/// Chunk; layers, each with whether the disk has it; claims.
type Entry = (u8, BTreeMap<u32, bool>, usize);

impl Model {
    fn bytes_of(chunk: u8, layers: &BTreeMap<u32, bool>) -> u64 {
        layers.keys().map(|layer| size(chunk, *layer) as u64).sum()
    }

    fn bytes(&self) -> u64 {
        self.chunks.iter().map(|(chunk, layers, _)| Self::bytes_of(*chunk, layers)).sum()
    }

    /// Bytes of a tenant.
    fn held(chunks: &[Entry], number: u8) -> u64 {
        let own = chunks.iter().filter(|(chunk, ..)| chunk % 3 == number);
        own.map(|(chunk, layers, _)| Self::bytes_of(*chunk, layers)).sum()
    }

    /// The place of the first that may be dropped, of those that the disk has, or else of the others.
    fn cheapest(
        left: &[Entry],
        keep: u8,
        on_disk: bool,
        wanted: impl Fn(usize, &[Entry]) -> bool,
    ) -> Option<usize> {
        let of = |only_copies: bool| {
            (0..left.len()).find(|at| {
                let (held, layers, claims) = &left[*at];
                let fits = layers.values().any(|there| !there) == only_copies;
                *held != keep && *claims == 0 && fits && wanted(*at, left)
            })
        };
        of(false).or_else(|| if on_disk { None } else { of(true) })
    }

    fn touch(&mut self, chunk: u8) -> Option<&mut (u8, BTreeMap<u32, bool>, usize)> {
        let at = self.chunks.iter().position(|(held, ..)| *held == chunk)?;
        let held = self.chunks.remove(at);
        self.chunks.push(held);
        self.chunks.last_mut()
    }

    fn has(&self, chunk: u8, layer: u32) -> bool {
        self.chunks.iter().any(|(held, layers, _)| *held == chunk && layers.contains_key(&layer))
    }

    fn insert(&mut self, chunk: u8, layers: &[u32], on_disk: bool) -> bool {
        let fresh: BTreeMap<u32, bool> =
            layers.iter().filter(|layer| !self.has(chunk, **layer)).map(|layer| (*layer, on_disk)).collect();
        let size = Self::bytes_of(chunk, &fresh);
        let owner = chunk % 3;
        let mut left = self.chunks.clone();
        let quota = self.quotas.get(usize::from(owner)).copied().flatten().unwrap_or(u64::MAX);
        while Self::held(&left, owner) + size > quota {
            let own = |at: usize, left: &[Entry]| left[at].0 % 3 == owner;
            let Some(at) = Self::cheapest(&left, chunk, on_disk, own) else { return false };
            left.remove(at);
        }
        let holds = |number: u8| number == owner || Self::held(&self.chunks, number) > 0;
        let share = self.budget / (0..3).filter(|number| holds(*number)).count() as u64;
        while left.iter().map(|(held, layers, _)| Self::bytes_of(*held, layers)).sum::<u64>() + size
            > self.budget
        {
            let above = |at: usize, left: &[Entry]| {
                let whose = left[at].0 % 3;
                Self::held(left, whose) + if whose == owner { size } else { 0 } > share
            };
            let first = Self::cheapest(&left, chunk, on_disk, above);
            let Some(at) = first.or_else(|| Self::cheapest(&left, chunk, on_disk, |_, _| true)) else {
                return false;
            };
            left.remove(at);
        }
        self.chunks = left;
        if self.touch(chunk).is_none() && !fresh.is_empty() {
            self.chunks.push((chunk, BTreeMap::new(), 0));
        }
        if let Some((_, layers, _)) = self.touch(chunk) {
            layers.extend(fresh);
        }
        true
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The tier does what the list does, stays within its budget, drops nothing that is claimed, and gives only the bytes
    /// that were put in.
    #[test]
    fn i8_i9_the_tier_is_a_list_that_keeps_to_its_budget(
        budget in 0..200_u64,
        quotas in prop::array::uniform2(prop::option::of(0..120_u64)),
        moves in moves(),
    ) {
        let named = quotas.iter().enumerate().filter_map(|(number, quota)| {
            let quota = TenantQuota { host_bytes: Some((*quota)?), ..TenantQuota::default() };
            Some((tenant(number as u8).name()?.to_owned(), quota))
        });
        let limits = TenantQuotas { named: named.collect(), others: TenantQuota::default() };
        let mut tier = HostTier::new(budget, limits);
        let mut model = Model { budget, quotas, ..Model::default() };
        let mut claims: Vec<(u8, Claim)> = Vec::new();
        for step in moves {
            match step {
                Move::Insert { chunk, layers, on_disk } => {
                    let cells = layers.iter().map(|layer| (*layer, bytes(chunk, *layer))).collect();
                    let kept = tier.insert(&tenant(chunk), id(chunk), cells, on_disk);
                    prop_assert_eq!(kept, model.insert(chunk, &layers, on_disk));
                }
                Move::Claim(chunk) => {
                    let claim = tier.claim(&id(chunk));
                    let held = model.touch(chunk);
                    prop_assert_eq!(claim.is_some(), held.is_some());
                    held.into_iter().for_each(|(_, _, count)| *count += 1);
                    claims.extend(claim.map(|claim| (chunk, claim)));
                }
                Move::Release(at) if at < claims.len() => {
                    let (chunk, claim) = claims.remove(at);
                    drop(claim);
                    // A chunk whose last cell was damaged is gone in spite of its claim.
                    for (held, _, count) in &mut model.chunks {
                        *count -= usize::from(*held == chunk && *count > 0);
                    }
                }
                Move::Release(_) => {}
                Move::Touch(chunk) => {
                    tier.touch(&id(chunk));
                    model.touch(chunk);
                }
                Move::OnDisk(chunk, on_disk) => {
                    tier.set_on_disk(&id(chunk), on_disk);
                    for (held, layers, _) in &mut model.chunks {
                        if *held == chunk {
                            layers.values_mut().for_each(|there| *there = on_disk);
                        }
                    }
                }
                Move::Read(chunk, layer, fault) => {
                    let read = tier.read(&id(chunk), layer, fault);
                    let there = model.has(chunk, layer);
                    match fault {
                        TierFault::None if there => prop_assert_eq!(read, Ok(bytes(chunk, layer))),
                        TierFault::FlipBit | TierFault::Tear | TierFault::Stale if there => {
                            let miss = read.unwrap_err();
                            prop_assert!(miss != HostMiss::Absent);
                            for (held, layers, _) in &mut model.chunks {
                                if *held == chunk {
                                    layers.remove(&layer);
                                }
                            }
                            if model.chunks.iter().any(|(held, layers, _)| *held == chunk && layers.is_empty()) {
                                model.chunks.retain(|(_, layers, _)| !layers.is_empty());
                                claims.retain(|(held, _)| *held != chunk);
                            }
                        }
                        _ => prop_assert_eq!(read, Err(HostMiss::Absent)),
                    }
                }
            }
            let view = tier.view();
            prop_assert!(view.bytes <= budget);
            prop_assert_eq!(view.bytes, model.bytes());
            for number in 0..3 {
                let held = Model::held(&model.chunks, number);
                prop_assert_eq!(tier.held_by(&tenant(number)), held);
                prop_assert!(quotas.get(usize::from(number)).copied().flatten().is_none_or(|quota| held <= quota));
            }
            let cells: usize = model.chunks.iter().map(|(_, layers, _)| layers.len()).sum();
            prop_assert_eq!(view.cells, cells as u64);
            for chunk in 0..8 {
                for layer in 0..4 {
                    prop_assert_eq!(tier.has(&id(chunk), layer), model.has(chunk, layer));
                }
            }
            for (chunk, _) in &claims {
                prop_assert!(tier.chunk_bytes(&id(*chunk)) > 0, "a claimed chunk was dropped");
            }
        }
    }
}

#[test]
fn chunks_that_the_disk_lacks_go_last() {
    let cell = |chunk: u8| vec![(0, Arc::new(vec![chunk; 10]))];
    let mut tier = HostTier::new(30, TenantQuotas::default());
    assert!(tier.insert(&nobody(), id(1), cell(1), false) && tier.insert(&nobody(), id(2), cell(2), true));
    assert!(tier.insert(&nobody(), id(3), cell(3), true));
    tier.touch(&id(2));
    assert!(tier.insert(&nobody(), id(4), cell(4), true), "the third was used longest ago of those on disk");
    assert!(tier.has(&id(1), 0) && tier.has(&id(2), 0) && !tier.has(&id(3), 0));
    for chunk in [5, 6] {
        assert!(tier.insert(&nobody(), id(chunk), cell(chunk), false));
    }
    assert!(!tier.insert(&nobody(), id(7), cell(7), true), "three only copies are not given up for a copy");
    assert!(tier.insert(&nobody(), id(7), cell(7), false), "but for one that is nowhere else");
    assert!(!tier.has(&id(1), 0));
    tier.set_on_disk(&id(6), true);
    assert!(tier.insert(&nobody(), id(8), cell(8), true) && !tier.has(&id(6), 0));
}

#[test]
fn i9_a_claim_keeps_a_chunk_until_it_is_dropped_and_nobody_waits() {
    let cell = |chunk: u8| vec![(0, Arc::new(vec![chunk; 10]))];
    let mut tier = HostTier::new(20, TenantQuotas::default());
    assert!(tier.insert(&nobody(), id(1), cell(1), true) && tier.insert(&nobody(), id(2), cell(2), true));
    let claims = [tier.claim(&id(1)), tier.claim(&id(1)), tier.claim(&id(2))];
    assert!(tier.claim(&id(3)).is_none());
    assert!(!tier.insert(&nobody(), id(3), cell(3), false), "there is no room, and that is the answer");
    let [first, second, third] = claims;
    drop(third);
    assert!(tier.insert(&nobody(), id(3), cell(3), false) && tier.has(&id(1), 0) && !tier.has(&id(2), 0));
    drop(first);
    assert!(!tier.insert(&nobody(), id(4), vec![(0, Arc::new(vec![4; 20]))], false), "one claim is left");
    drop(second);
    assert!(tier.insert(&nobody(), id(4), vec![(0, Arc::new(vec![4; 20]))], false));
}

#[test]
fn cells_of_several_sessions_are_counted_once() {
    let mut tier = HostTier::new(100, TenantQuotas::default());
    let shared: CellBytes = Arc::new(vec![7; 40]);
    for _ in 0..3 {
        assert!(tier.insert(
            &nobody(),
            id(1),
            vec![(0, Arc::clone(&shared)), (1, Arc::new(vec![8; 40]))],
            true
        ));
    }
    assert_eq!(tier.view(), HostView { bytes: 80, budget: 100, cells: 2 });
}

#[test]
fn a_tenant_above_its_share_makes_room_and_one_at_its_quota_for_itself() {
    let cell = |chunk: u8| vec![(0, Arc::new(vec![chunk; 10]))];
    let [a, b] = [0, 1].map(tenant);
    let mut tier = HostTier::new(40, TenantQuotas::default());
    assert!(tier.insert(&b, id(1), cell(1), true));
    for chunk in [10, 11, 12] {
        assert!(tier.insert(&a, id(chunk), cell(chunk), chunk == 12));
    }
    assert!(tier.insert(&b, id(2), cell(2), true));
    assert!(tier.has(&id(1), 0), "the oldest, of one within its share");
    assert!(!tier.has(&id(12), 0), "of one above its share what the disk has");
    assert!(tier.insert(&b, id(3), cell(3), true) && !tier.has(&id(1), 0), "who asks for more gives its own");
    assert_eq!((tier.held_by(&a), tier.held_by(&b)), (20, 20));

    let quota = TenantQuota { host_bytes: Some(20), ..TenantQuota::default() };
    let named = [("a".to_owned(), quota)].into();
    let mut tier = HostTier::new(100, TenantQuotas { named, others: TenantQuota::default() });
    assert!(tier.insert(&b, id(1), cell(1), true));
    for chunk in [10, 11, 12] {
        assert!(tier.insert(&a, id(chunk), cell(chunk), true));
    }
    assert!(tier.has(&id(1), 0) && !tier.has(&id(10), 0) && tier.held_by(&a) == 20);
    assert!(!tier.insert(&a, id(13), vec![(0, Arc::new(vec![0; 21]))], true), "more than the quota");
    assert!(tier.has(&id(11), 0), "for which nothing is dropped");
}
