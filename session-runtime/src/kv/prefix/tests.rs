//! What a lookup costs, and what the tree keeps. That it finds the right thing is tested against a plain model in
//! `tests/prefix_model.rs`.

use std::cell::Cell;

use super::*;
use crate::kv::chunk::chunks;

const CONTRACT: Digest = [1; 32];

fn session(number: usize) -> Arc<str> {
    format!("sess_{number:05}").into()
}

#[test]
fn a_lookup_asks_one_session_among_many_that_begin_alike() {
    let mut tree = PrefixTree::new(0);
    let system: Vec<u32> = (0..1000).collect();
    for number in 0..2000 {
        let mut tokens = system.clone();
        tokens.extend([7, number as u32, 7]);
        tree.extend(&session(number), &CONTRACT, &tokens);
    }
    let (nodes, tokens, _) = tree.size();
    // The root, the common beginning, and an end for each.
    assert_eq!((nodes, tokens), (2 + 2000, 1000 + 1 + 2 * 2000));
    let asked = Cell::new(0);
    let usable = |_: &str, _: usize| {
        asked.set(asked.get() + 1);
        true
    };
    let mut wanted = system;
    wanted.extend([7, 1500, 8]);
    let found = tree.lookup(&CONTRACT, &wanted, usable, |_| None);
    assert_eq!(found.device, Some((session(0), 992)), "the smallest of those with as many whole pages");
    assert_eq!(asked.get(), 1);
    (0..2000).for_each(|number| tree.truncate(&session(number), 0));
    assert_eq!(tree.size(), (0, 0, 0));
}

#[test]
fn a_session_that_decodes_makes_its_edge_longer() {
    let mut tree = PrefixTree::new(0);
    for token in 0..500 {
        tree.extend(&session(0), &CONTRACT, &[token]);
    }
    assert_eq!(tree.size(), (2, 500, 0));
    // Another that says the same step by step leaves one boundary, where it ends.
    for token in 0..400 {
        tree.extend(&session(1), &CONTRACT, &[token]);
    }
    assert_eq!(tree.size(), (3, 500, 0));
    tree.truncate(&session(0), 100);
    assert_eq!((tree.held(&session(0)), tree.size()), (100, (3, 400, 0)));
    tree.check().unwrap();
}

#[test]
fn i8_names_are_forgotten_from_the_end_of_what_was_of_use_the_longest_ago() {
    let mut tree = PrefixTree::new(6);
    let histories: [Vec<u32>; 2] = [vec![1; 4 * CHUNK_TOKENS], vec![2; 4 * CHUNK_TOKENS]];
    for history in &histories {
        for chunk in chunks(&CONTRACT, history) {
            tree.keep(&CONTRACT, history, &chunk, Tiers::BOTH);
        }
    }
    let known = |tree: &PrefixTree, history: &[u32]| {
        chunks(&CONTRACT, history).iter().filter(|chunk| tree.nodes.has_chunk(&chunk.id)).count()
    };
    assert_eq!([known(&tree, &histories[0]), known(&tree, &histories[1])], [2, 4]);
    assert_eq!(tree.size(), (3, 6 * CHUNK_TOKENS, 6));
    // They are there all the same, and known again once asked for.
    let found = tree.lookup(&CONTRACT, &histories[0], |_, _| false, |_| Some(Tiers::DISK));
    assert_eq!(found, Found { device: None, host: 0, disk: 4, saved: 4 });
    assert_eq!([known(&tree, &histories[0]), known(&tree, &histories[1])], [4, 2]);
    // Without the first the others are of no use.
    tree.drop(&chunks(&CONTRACT, &histories[0])[0].id, Tiers::BOTH);
    assert_eq!([known(&tree, &histories[0]), known(&tree, &histories[1])], [0, 2]);
    tree.check().unwrap();
}

#[test]
fn saved_chunks_are_better_only_by_more_than_the_margin() {
    let device = Some((session(3), 128));
    let found = |saved| Found { device: device.clone(), saved, ..Found::default() };
    assert_eq!(found(3).best(CHUNK_TOKENS), Best::Device { session: session(3), tokens: 128 });
    assert_eq!(found(4).best(CHUNK_TOKENS), Best::Saved { tokens: 256 });
    assert_eq!(Found::default().best(0), Best::Nobody);
    assert_eq!(Found { saved: 1, ..Found::default() }.best(0), Best::Saved { tokens: 64 });
}
