//! Pool, block tables and prefix tree against a plain model: the model knows each session's tokens and nothing of pages.
//!
//! A page's slot holds a digest of everything that its K and V depend on: layer, head and all tokens up to its own. So a
//! page that is freed while in use, written while shared, or shared between different histories shows as a
//! wrong digest, and a leak or a second release as a wrong count.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use kernels::backend::{PAGE_TOKENS, PageId};
use proptest::prelude::*;
use proptest::test_runner::Config;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};
use session_runtime::kv::contract::Digest;
use session_runtime::kv::pool::PagePool;
use session_runtime::kv::prefix::PrefixTree;
use session_runtime::kv::shape::TableShape;
use session_runtime::kv::table::{BlockTable, Need};

const SESSIONS: u8 = 4;
const CONTRACT: Digest = [0; 32];
const MOST_TOKENS: usize = 400;
const STEP: usize = 96;
const WINDOWS: [Option<usize>; 2] = [None, Some(50)];
/// Less than the sessions can ask for, so that some must leave.
const PAGES: usize = 70;

/// What a client sees: which tokens each session has.
type Histories = BTreeMap<u8, Vec<u32>>;

#[derive(Clone, Debug)]
enum Move {
    /// Tokens are computed at the end of a session.
    Append { session: u8, tokens: Vec<u32> },
    /// A session begins with all of another's tokens, on its pages.
    Fork { source: u8, target: u8 },
    /// A session begins like another and goes on by itself: it takes the pages that the prefix tree finds.
    Begin { source: u8, target: u8, tokens: usize, more: Vec<u32> },
    /// A session loses its last tokens.
    Cut { session: u8, tokens: usize },
    /// A session leaves the device.
    Evict { session: u8 },
    /// A session is forgotten.
    Close { session: u8 },
}

struct Model;

impl ReferenceStateMachine for Model {
    type State = Histories;
    type Transition = Move;

    fn init_state() -> BoxedStrategy<Histories> {
        Just(Histories::new()).boxed()
    }

    fn transitions(_: &Histories) -> BoxedStrategy<Move> {
        let session = || 0..SESSIONS;
        // Few words, so that different sessions often begin alike.
        let tokens = || prop::collection::vec(0u32..2, 1..STEP);
        prop_oneof![
            6 => (session(), tokens()).prop_map(|(session, tokens)| Move::Append { session, tokens }),
            2 => (session(), session()).prop_map(|(source, target)| Move::Fork { source, target }),
            3 => (session(), session(), 0..MOST_TOKENS, tokens())
                .prop_map(|(source, target, tokens, more)| Move::Begin { source, target, tokens, more }),
            1 => (session(), 0..MOST_TOKENS).prop_map(|(session, tokens)| Move::Cut { session, tokens }),
            1 => session().prop_map(|session| Move::Evict { session }),
            1 => session().prop_map(|session| Move::Close { session }),
        ]
        .boxed()
    }

    fn preconditions(state: &Histories, transition: &Move) -> bool {
        let length = |session: &u8| state.get(session).map_or(0, Vec::len);
        match transition {
            Move::Append { session, tokens } => length(session) + tokens.len() <= MOST_TOKENS,
            Move::Fork { source, target } => length(source) > 0 && length(target) == 0,
            Move::Begin { source, target, tokens, more } => {
                length(target) == 0 && *tokens <= length(source) && tokens + more.len() <= MOST_TOKENS
            }
            Move::Cut { session, tokens } => *tokens < length(session),
            Move::Evict { session } | Move::Close { session } => length(session) > 0,
        }
    }

    fn apply(mut state: Histories, transition: &Move) -> Histories {
        match transition {
            Move::Append { session, tokens } => state.entry(*session).or_default().extend(tokens),
            Move::Fork { source, target } => {
                let tokens = state[source].clone();
                state.insert(*target, tokens);
            }
            Move::Begin { source, target, tokens, more } => {
                let common = state.get(source).map_or(&[][..], |source| &source[..*tokens]);
                let tokens = [common, more].concat();
                state.insert(*target, tokens);
            }
            Move::Cut { session, tokens } => state.get_mut(session).unwrap().truncate(*tokens),
            Move::Evict { .. } => {}
            Move::Close { session } => {
                state.remove(session);
            }
        }
        state
    }
}

/// The real pool, tables and tree over a device that keeps digests.
struct Device {
    pool: PagePool,
    shape: Arc<TableShape>,
    tables: BTreeMap<u8, BlockTable>,
    tree: PrefixTree,
    slots: HashMap<PageId, [u64; PAGE_TOKENS]>,
}

/// For each position the digest of all tokens up to it, in one list of pages.
fn digests(layer: usize, tokens: &[u32]) -> Vec<u64> {
    let mut digest = layer as u64;
    tokens
        .iter()
        .map(|token| {
            let mut hasher = DefaultHasher::new();
            (digest, token).hash(&mut hasher);
            digest = hasher.finish();
            digest
        })
        .collect()
}

fn id(session: u8) -> Arc<str> {
    session.to_string().into()
}

fn number(session: &str) -> u8 {
    session.parse().unwrap()
}

impl Device {
    fn table(&mut self, session: u8) -> BlockTable {
        self.tables.remove(&session).unwrap_or_else(|| BlockTable::with_shape(Arc::clone(&self.shape)))
    }

    fn leave(&mut self, session: u8) {
        self.table(session).truncate(&mut self.pool, 0);
    }

    /// Computes `tokens[written..]`, pushing other sessions out where there is no room.
    fn compute(&mut self, session: u8, written: usize, tokens: &[u32]) {
        let mut table = self.table(session);
        let mut written = if table.is_empty() { 0 } else { written };
        while written < tokens.len() {
            let end = (written + STEP).min(tokens.len());
            let need = Need::Write { written, tokens: end };
            let before = table.all().copied().collect::<Vec<_>>();
            let wanted = table.pages_wanted(&self.pool, need);
            let Ok(copies) = table.prepare_for(&mut self.pool, need) else {
                assert!(wanted > self.pool.free(), "refused although there is room");
                assert_eq!(before, table.all().copied().collect::<Vec<_>>(), "a refusal changes nothing");
                let victim = *self.tables.keys().next().expect("one session alone has room");
                self.leave(victim);
                continue;
            };
            for copy in copies {
                let content = self.slots[&copy.source];
                self.slots.insert(copy.target, content);
            }
            for layer in 0..WINDOWS.len() {
                let digests = digests(layer, &tokens[..end]);
                for (position, digest) in digests.into_iter().enumerate().skip(written) {
                    let page = table.pages(layer, 0)[position / PAGE_TOKENS];
                    assert_ne!(page, PageId::ABSENT);
                    assert!(!self.pool.is_shared(page), "a shared page is copied before it is written");
                    self.slots.entry(page).or_default()[position % PAGE_TOKENS] = digest;
                }
            }
            table.trim(&mut self.pool, end);
            written = end;
        }
        self.tables.insert(session, table);
    }

    /// Gives `target` what `source` has of its first `tokens` tokens, if all of it is there.
    fn fork(&mut self, source: u8, target: u8, tokens: usize) {
        if let Some(table) = self.tables.get(&source).filter(|table| tokens > 0 && table.covers(tokens)) {
            let table = table.fork(&mut self.pool, tokens);
            self.tables.insert(target, table);
        }
    }

    /// Has a new session take what others have of its beginning, and compute the rest.
    fn begin(&mut self, target: u8, histories: &Histories) {
        let tokens = &histories[&target];
        let usable = |session: &str, count: usize| self.tables[&number(session)].covers(count);
        let found = self.tree.lookup(&CONTRACT, tokens, usable, |_| None).device;
        let there = |(session, table): (&u8, &BlockTable)| {
            let common = histories[session].iter().zip(tokens).take_while(|(a, b)| a == b).count();
            let count = common / PAGE_TOKENS * PAGE_TOKENS;
            (count > 0 && table.covers(count)).then_some((count, std::cmp::Reverse(*session)))
        };
        let best = self.tables.iter().filter_map(there).max();
        assert_eq!(
            found,
            best.map(|(count, session)| (id(session.0), count)),
            "the most, and the smallest id"
        );
        if let Some((source, count)) = &found {
            self.fork(number(source), target, *count);
        }
        self.compute(target, found.map_or(0, |(_, count)| count), tokens);
    }

    /// Tells the tree what has become of whom.
    fn note(&mut self, histories: &Histories) {
        for session in 0..SESSIONS {
            let resident = histories.get(&session).filter(|_| self.tables.contains_key(&session));
            let tokens = resident.map_or(&[][..], Vec::as_slice);
            let session = id(session);
            self.tree.truncate(&session, tokens.len());
            let held = self.tree.held(&session);
            self.tree.extend(&session, &CONTRACT, &tokens[held..]);
        }
        self.tree.check().unwrap();
    }

    fn check(&self, histories: &Histories) {
        let holders = self.tables.values().flat_map(BlockTable::all);
        self.pool.check(holders).unwrap();
        for (session, table) in &self.tables {
            let tokens = histories.get(session).map_or(&[][..], Vec::as_slice);
            for layer in 0..WINDOWS.len() {
                let first = self.shape.first_kept(layer, tokens.len());
                assert!(table.range(layer, first, tokens.len()).is_some(), "session {session} misses pages");
                for (position, digest) in digests(layer, tokens).into_iter().enumerate().skip(first) {
                    let page = table.pages(layer, 0)[position / PAGE_TOKENS];
                    let there = self.slots[&page][position % PAGE_TOKENS];
                    assert_eq!(there, digest, "session {session}, layer {layer}, position {position}");
                }
            }
        }
    }
}

impl StateMachineTest for Device {
    type SystemUnderTest = Self;
    type Reference = Model;

    fn init_test(_: &Histories) -> Self {
        let shape = Arc::new(TableShape::new(WINDOWS.to_vec(), 1, STEP));
        assert!(shape.pages_most(MOST_TOKENS) <= PAGES);
        Self {
            pool: PagePool::new(PAGES),
            shape,
            tables: BTreeMap::new(),
            tree: PrefixTree::new(0),
            slots: HashMap::new(),
        }
    }

    fn apply(mut device: Self, histories: &Histories, transition: Move) -> Self {
        match transition {
            Move::Append { session, tokens } => {
                let history = &histories[&session];
                device.compute(session, history.len() - tokens.len(), history);
            }
            Move::Fork { source, target } => device.fork(source, target, histories[&source].len()),
            Move::Begin { target, .. } => device.begin(target, histories),
            Move::Cut { session, tokens } => {
                let mut table = device.table(session);
                table.truncate(&mut device.pool, tokens);
                // What a window has dropped only a restore brings back.
                if tokens > 0 && table.covers(tokens) {
                    device.tables.insert(session, table);
                } else {
                    table.truncate(&mut device.pool, 0);
                }
            }
            Move::Evict { session } | Move::Close { session } => device.leave(session),
        }
        device.note(histories);
        device.check(histories);
        device
    }

    fn teardown(mut device: Self, _: Histories) {
        for session in 0..SESSIONS {
            device.leave(session);
        }
        device.note(&Histories::new());
        assert_eq!(device.pool.free(), device.pool.total(), "everything is given back");
        assert_eq!(device.tree.size(), (0, 0, 0));
    }
}

prop_state_machine! {
    #![proptest_config(Config { cases: 1000, max_local_rejects: 1 << 20, failure_persistence: None, ..Config::default() })]

    /// A hundred thousand moves: no leak, no second release, no page of another history.
    #[test]
    fn i9_pages_follow_the_plain_model(sequential 100..101 => Device);
}
