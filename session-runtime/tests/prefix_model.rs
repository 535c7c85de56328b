//! The prefix tree against a plain model: lists of sessions with their tokens, and of saved chunks with all tokens up to their
//! ends, compared one by one.
//!
//! A lookup has to find what the plain search finds: most tokens, the smallest id, nothing of another history or contract. After
//! every move the tree has what its sessions and known chunks need and no more.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use kernels::backend::PAGE_TOKENS;
use proptest::prelude::*;
use proptest::test_runner::Config;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};
use session_runtime::kv::chunk::{CHUNK_TOKENS, Chunk, ChunkId, chunks};
use session_runtime::kv::contract::Digest;
use session_runtime::kv::prefix::{Found, PrefixTree, Tiers};

const SESSIONS: u8 = 6;
const CONTRACTS: u8 = 2;
const MOST_TOKENS: usize = 500;
/// Fewer than there are, so that some are forgotten.
const NAMES: usize = 12;

#[derive(Clone, Debug)]
struct Session {
    contract: u8,
    tokens: Vec<u32>,
    /// Tokens on the device.
    held: usize,
}

/// What is where.
#[derive(Clone, Debug, Default)]
struct World {
    sessions: BTreeMap<u8, Session>,
    /// Whole chunks on the tiers, by contract and all tokens up to their ends.
    chunks: BTreeMap<(u8, Vec<u32>), Tiers>,
}

#[derive(Clone, Debug)]
enum Move {
    /// A session computes more tokens, or brings all back.
    Extend { session: u8, contract: u8, run: (u32, usize) },
    /// A session has only its first tokens left.
    Cut { session: u8, tokens: usize },
    /// A session goes on with another's tokens under a contract.
    Fork { source: u8, target: u8, contract: u8 },
    /// A session leaves the device.
    Evict { session: u8 },
    /// A session is forgotten.
    Close { session: u8 },
    /// A chunk of a session comes to tiers.
    Save { session: u8, chunk: usize, tiers: Tiers },
    /// A chunk leaves tiers; the tree is told, or is not.
    Leave { chunk: usize, tiers: Tiers, told: bool },
    /// The process begins anew: what is on disk is there, and nothing is known of it.
    Restart,
    /// Someone asks for a history.
    Lookup { contract: u8, runs: Vec<(u32, usize)> },
    /// Someone asks for a history that begins with a session's.
    LookupLike { session: u8, tokens: usize, run: (u32, usize) },
}

fn run() -> impl Strategy<Value = (u32, usize)> {
    // Few words in long runs, so that histories part anywhere.
    (0u32..2, prop_oneof![1usize..20, Just(16), Just(48), 60usize..140])
}

fn tiers() -> impl Strategy<Value = Tiers> {
    prop_oneof![Just(Tiers::HOST), Just(Tiers::DISK), Just(Tiers::BOTH)]
}

fn written(runs: &[(u32, usize)]) -> Vec<u32> {
    runs.iter().flat_map(|(token, count)| std::iter::repeat_n(*token, *count)).collect()
}

struct Model;

impl ReferenceStateMachine for Model {
    type State = World;
    type Transition = Move;

    fn init_state() -> BoxedStrategy<World> {
        Just(World::default()).boxed()
    }

    fn transitions(_: &World) -> BoxedStrategy<Move> {
        let (session, contract) = (|| 0..SESSIONS, || prop_oneof![4 => Just(0), 1 => 1..CONTRACTS]);
        prop_oneof![
            40 => (session(), contract(), run())
                .prop_map(|(session, contract, run)| Move::Extend { session, contract, run }),
            10 => (session(), 0..MOST_TOKENS).prop_map(|(session, tokens)| Move::Cut { session, tokens }),
            10 => (session(), session(), contract())
                .prop_map(|(source, target, contract)| Move::Fork { source, target, contract }),
            5 => session().prop_map(|session| Move::Evict { session }),
            5 => session().prop_map(|session| Move::Close { session }),
            30 => (session(), 0..MOST_TOKENS / CHUNK_TOKENS, tiers())
                .prop_map(|(session, chunk, tiers)| Move::Save { session, chunk, tiers }),
            5 => (0usize..64, tiers(), any::<bool>())
                .prop_map(|(chunk, tiers, told)| Move::Leave { chunk, tiers, told }),
            1 => Just(Move::Restart),
            15 => (contract(), prop::collection::vec(run(), 1..5))
                .prop_map(|(contract, runs)| Move::Lookup { contract, runs }),
            20 => (session(), 0..=MOST_TOKENS, run())
                .prop_map(|(session, tokens, run)| Move::LookupLike { session, tokens, run }),
        ]
        .boxed()
    }

    fn preconditions(state: &World, transition: &Move) -> bool {
        let length = |session: &u8| state.sessions.get(session).map_or(0, |session| session.tokens.len());
        match transition {
            Move::Extend { session, run, .. } => length(session) + run.1 <= MOST_TOKENS,
            Move::Cut { session, tokens } => *tokens < length(session),
            Move::Fork { source, target, .. } => length(source) > 0 && length(target) == 0,
            Move::Save { session, chunk, .. } => (chunk + 1) * CHUNK_TOKENS <= length(session),
            Move::Leave { chunk, .. } => *chunk < state.chunks.len(),
            Move::Evict { session } | Move::Close { session } | Move::LookupLike { session, .. } => {
                length(session) > 0
            }
            Move::Restart | Move::Lookup { .. } => true,
        }
    }

    fn apply(mut world: World, transition: &Move) -> World {
        match transition {
            Move::Extend { session, contract, run } => {
                let fresh = || Session { contract: *contract, tokens: Vec::new(), held: 0 };
                let session = world.sessions.entry(*session).or_insert_with(fresh);
                session.tokens.extend(written(&[*run]));
                session.held = session.tokens.len();
            }
            Move::Cut { session, tokens } => {
                let session = world.sessions.get_mut(session).unwrap();
                session.tokens.truncate(*tokens);
                session.held = session.held.min(*tokens);
            }
            Move::Fork { source, target, contract } => {
                let source = world.sessions[source].clone();
                world.sessions.insert(*target, Session { contract: *contract, ..source });
            }
            Move::Evict { session } => world.sessions.get_mut(session).unwrap().held = 0,
            Move::Close { session } => {
                world.sessions.remove(session);
            }
            Move::Save { session, chunk, tiers } => {
                let session = &world.sessions[session];
                let tokens = session.tokens[..(chunk + 1) * CHUNK_TOKENS].to_vec();
                let kept = world.chunks.entry((session.contract, tokens)).or_default();
                *kept = Tiers { host: kept.host || tiers.host, disk: kept.disk || tiers.disk };
            }
            Move::Leave { chunk, tiers, .. } => {
                for (index, kept) in world.chunks.values_mut().enumerate() {
                    if index == *chunk {
                        *kept = Tiers { host: kept.host && !tiers.host, disk: kept.disk && !tiers.disk };
                    }
                }
                world.chunks.retain(|_, kept| *kept != Tiers::NEITHER);
            }
            Move::Restart => {
                world.sessions.values_mut().for_each(|session| session.held = 0);
                world.chunks.values_mut().for_each(|kept| kept.host = false);
                world.chunks.retain(|_, kept| *kept != Tiers::NEITHER);
            }
            Move::Lookup { .. } | Move::LookupLike { .. } => {}
        }
        world
    }
}

fn digest(contract: u8) -> Digest {
    [contract; 32]
}

/// A session's id. Ids have another order than numbers, for no reason but that they may.
fn id(session: u8) -> Arc<str> {
    format!("sess_{}", (session * 7) % 10).into()
}

/// The fewest tokens that a session can give: one with windows has dropped the pages of its beginning.
fn fewest(session: &str) -> usize {
    if session == id(2).as_ref() { 100 } else { 0 }
}

fn sealed(contract: u8, tokens: &[u32]) -> Vec<Chunk> {
    chunks(&digest(contract), tokens).into_iter().filter(Chunk::is_sealed).collect()
}

impl World {
    /// Compares everything with everything.
    fn search(&self, contract: u8, tokens: &[u32]) -> Found {
        let of_session = |(number, session): (&u8, &Session)| {
            let there = &session.tokens[..session.held];
            let common = there.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            (session.contract == contract).then(|| (id(*number), common / PAGE_TOKENS * PAGE_TOKENS))
        };
        let device = self
            .sessions
            .iter()
            .filter_map(of_session)
            .filter(|(session, count)| *count > 0 && *count >= fewest(session))
            .max_by(|(a, first), (b, second)| first.cmp(second).then_with(|| b.cmp(a)));
        let mut found = Found { device, ..Found::default() };
        for index in 0..tokens.len() / CHUNK_TOKENS {
            let tokens = tokens[..(index + 1) * CHUNK_TOKENS].to_vec();
            let Some(tiers) = self.chunks.get(&(contract, tokens)) else { break };
            found.host += usize::from(tiers.host && found.host == index);
            found.disk += usize::from(tiers.disk && found.disk == index);
            found.saved += 1;
        }
        found
    }

    /// Tokens and tiers of chunks by their ids.
    fn by_id(&self) -> HashMap<ChunkId, Tiers> {
        let chunk = |((contract, tokens), tiers): (&(u8, Vec<u32>), &Tiers)| {
            (sealed(*contract, tokens).pop().unwrap().id, *tiers)
        };
        self.chunks.iter().map(chunk).collect()
    }
}

/// The tree beside the tiers that it is told of.
struct Tree {
    tree: PrefixTree,
    tiers: HashMap<ChunkId, Tiers>,
    /// Every chunk that it was told of.
    told: HashSet<ChunkId>,
}

impl Tree {
    fn new(tiers: HashMap<ChunkId, Tiers>) -> Self {
        Self { tree: PrefixTree::new(NAMES), told: tiers.keys().copied().collect(), tiers }
    }

    /// Has the tree hold what a session has on the device.
    fn hold(&mut self, number: u8, session: &Session) {
        let id = id(number);
        self.tree.truncate(&id, session.held);
        let held = self.tree.held(&id);
        self.tree.extend(&id, &digest(session.contract), &session.tokens[held..session.held]);
    }

    fn lookup(&mut self, world: &World, contract: u8, tokens: &[u32]) {
        let usable = |session: &str, count: usize| count >= fewest(session);
        let whereabouts = |chunk: &ChunkId| self.tiers.get(chunk).copied();
        let found = self.tree.lookup(&digest(contract), tokens, usable, whereabouts);
        assert_eq!(found, world.search(contract, tokens));
    }

    fn check(&self, world: &World) {
        self.tree.check().unwrap();
        let held: usize = world.sessions.values().map(|session| session.held).sum();
        let (nodes, tokens, names) = self.tree.size();
        assert!(
            names <= NAMES && tokens <= held + names * CHUNK_TOKENS,
            "{tokens} tokens for {held} and {names}"
        );
        let residents = world.sessions.values().filter(|session| session.held > 0).count();
        // Every end divides at most one edge, and every leaf is an end.
        assert!(nodes <= 2 * (residents + names) + usize::from(CONTRACTS), "{nodes} nodes");
        for (number, session) in &world.sessions {
            assert_eq!(self.tree.held(&id(*number)), session.held);
        }
    }
}

impl StateMachineTest for Tree {
    type SystemUnderTest = Self;
    type Reference = Model;

    fn init_test(_: &World) -> Self {
        Self::new(HashMap::new())
    }

    fn apply(mut tree: Self, world: &World, transition: Move) -> Self {
        match transition {
            Move::Extend { session, .. } | Move::Cut { session, .. } | Move::Evict { session } => {
                tree.hold(session, &world.sessions[&session]);
            }
            Move::Fork { target, .. } => tree.hold(target, &world.sessions[&target]),
            Move::Close { session } => tree.tree.truncate(&id(session), 0),
            Move::Save { session, chunk, tiers } => {
                let Session { contract, tokens, .. } = &world.sessions[&session];
                let chunk = sealed(*contract, tokens).remove(chunk);
                tree.tree.keep(&digest(*contract), tokens, &chunk, tiers);
                tree.told.insert(chunk.id);
                tree.tiers = world.by_id();
            }
            Move::Leave { told, .. } => {
                let left = world.by_id();
                for (chunk, tiers) in std::mem::replace(&mut tree.tiers, left) {
                    let now = tree.tiers.get(&chunk).copied().unwrap_or_default();
                    let gone = Tiers { host: tiers.host && !now.host, disk: tiers.disk && !now.disk };
                    if told && gone != Tiers::NEITHER {
                        tree.tree.drop(&chunk, gone);
                    }
                }
            }
            Move::Restart => tree = Self::new(world.by_id()),
            Move::Lookup { contract, runs } => tree.lookup(world, contract, &written(&runs)),
            Move::LookupLike { session, tokens, run } => {
                let Session { contract, tokens: history, .. } = &world.sessions[&session];
                let mut history = history[..tokens.min(history.len())].to_vec();
                history.extend(written(&[run]));
                tree.lookup(world, *contract, &history);
                tree.lookup(world, (contract + 1) % CONTRACTS, &history);
            }
        }
        tree.check(world);
        tree
    }

    fn teardown(mut tree: Self, world: World) {
        for session in world.sessions.values() {
            tree.lookup(&world, session.contract, &session.tokens);
        }
        world.sessions.keys().for_each(|number| tree.tree.truncate(&id(*number), 0));
        // Also of what left unheard and was not asked for since.
        for chunk in &tree.told {
            tree.tree.drop(chunk, Tiers::BOTH);
        }
        tree.tree.check().unwrap();
        assert_eq!(tree.tree.size(), (0, 0, 0), "nothing is left");
    }
}

prop_state_machine! {
    #![proptest_config(Config { cases: 1000, max_local_rejects: 1 << 20, failure_persistence: None, ..Config::default() })]

    /// A hundred thousand moves.
    #[test]
    fn i3_lookups_find_what_a_plain_search_finds_and_nothing_of_another_contract(sequential 100..101 => Tree);
}
