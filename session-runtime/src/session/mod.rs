//! Sessions: long lives of agents, made of turns, kept in a journal.
//!
//! Knows tokens, segments, turns and the scheduler's words; knows no WebAssembly and no HTTP. The
//! payloads of journal events are JSON documents; their shape is [`event::SessionEvent`].

pub mod driver;
pub mod event;
pub mod host;
pub mod live;
pub mod manager;
pub mod record;
mod replay;
pub mod scope;
pub mod spec;
pub mod tool;
mod turns;
pub mod view;
mod writing;
