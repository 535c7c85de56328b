//! A driver in front of another that checks the rules of [`Driver`]: what touches the same memory is ordered, parts lie
//! inside of what was allocated, nothing is used after it was freed or freed while in use, and all is given back.
//!
//! Order is modelled by vector clocks. Each stream, and the host, counts its steps; a clock says up to which step of each
//! other everything has happened. Work on a stream comes after what was on it before, after what the host had waited for
//! when it was queued, and after the events the stream waits for. Two accesses to the same bytes of which one writes have
//! to be ordered.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels::cuda::{
    Arg, DeviceError, DeviceInfo, DeviceMemory, Driver, Event, Function, Launch, Module, PinnedMemory, Span,
    Stream,
};

/// The host, among the streams.
const HOST: u64 = 0;

/// Steps that have happened, by stream.
#[derive(Clone, Debug, Default)]
struct Clock(HashMap<u64, u64>);

impl Clock {
    fn join(&mut self, other: &Self) {
        for (&stream, &step) in &other.0 {
            let own = self.0.entry(stream).or_default();
            *own = step.max(*own);
        }
    }

    fn has(&self, stream: u64, step: u64) -> bool {
        self.0.get(&stream).is_some_and(|known| *known >= step)
    }

    fn tick(&mut self, stream: u64) -> u64 {
        let step = self.0.entry(stream).or_default();
        *step += 1;
        *step
    }
}

/// Someone read or wrote bytes.
#[derive(Clone, Debug)]
struct Access {
    bytes: Range<usize>,
    writes: bool,
    stream: u64,
    step: u64,
    what: String,
}

/// Memory, of the device or pinned.
#[derive(Debug)]
struct Memory {
    bytes: usize,
    accesses: Vec<Access>,
}

#[derive(Default)]
struct State {
    memory: HashMap<u64, Memory>,
    clocks: HashMap<u64, Clock>,
    events: HashMap<u64, Clock>,
    functions: HashMap<Function, String>,
    launches: Vec<String>,
    /// Rules that were broken.
    broken: Vec<String>,
}

/// The driver. Breaking a rule panics, unless it is only to be noted.
pub(crate) struct Recorder {
    inner: Box<dyn Driver>,
    state: Mutex<State>,
    only_note: bool,
    /// Calls until the device is lost.
    left: AtomicUsize,
    /// Which waiting is left out.
    deaf: Deaf,
}

/// Waiting that is left out, as a mistake in the launch code would.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Deaf {
    #[default]
    None,
    /// Of the stream that was made so many streams after the first.
    Stream(u64),
    /// Of the host for events.
    Host,
}

impl Recorder {
    pub(crate) fn new(inner: impl Driver) -> Self {
        let left = AtomicUsize::new(usize::MAX);
        Self { inner: Box::new(inner), state: Mutex::default(), only_note: false, left, deaf: Deaf::None }
    }

    /// As `new`; broken rules are told by [`Recorder::broken`].
    pub(crate) fn noting(inner: impl Driver) -> Self {
        Self { only_note: true, ..Self::new(inner) }
    }

    /// As `noting`, without some waiting.
    pub(crate) fn deaf(inner: impl Driver, deaf: Deaf) -> Self {
        Self { deaf, ..Self::noting(inner) }
    }

    /// Rules that were broken.
    pub(crate) fn broken(&self) -> Vec<String> {
        self.state.lock().unwrap().broken.clone()
    }

    /// Names of the kernels that were started.
    pub(crate) fn launches(&self) -> Vec<String> {
        self.state.lock().unwrap().launches.clone()
    }

    /// Everything was given back.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state.lock().unwrap();
        state.memory.is_empty()
            && state.clocks.keys().all(|stream| *stream == HOST)
            && state.events.is_empty()
    }

    /// The device is lost after `calls` more calls that can fail.
    pub(crate) fn lose_after(&self, calls: usize) {
        self.left.store(calls, Ordering::Relaxed);
    }

    /// Of those.
    pub(crate) fn calls_left(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    fn alive(&self, call: &'static str) -> Result<(), DeviceError> {
        let take = |left: usize| if left == usize::MAX { Some(left) } else { left.checked_sub(1) };
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => Ok(()),
            Err(_) => Err(DeviceError::Lost { call, problem: "the test wants it so".to_string() }),
        }
    }

    fn break_rule(&self, state: &mut State, what: String) {
        if !self.only_note && !std::thread::panicking() {
            panic!("{what}");
        }
        state.broken.push(what);
    }

    /// Work on `stream` (or by the host) that reads and writes these parts of memory.
    fn touch(&self, stream: u64, what: &str, parts: &[(u64, Range<usize>, bool)]) {
        let mut state = self.state.lock().unwrap();
        let host = state.clocks.entry(HOST).or_default().clone();
        if stream != HOST && !state.clocks.contains_key(&stream) {
            self.break_rule(&mut state, format!("{what} is put on a stream that is not there"));
        }
        let clock = state.clocks.entry(stream).or_default();
        clock.join(&host);
        let step = clock.tick(stream);
        let clock = clock.clone();
        for (memory, bytes, writes) in parts {
            let mut broken = Vec::new();
            match state.memory.get_mut(memory) {
                None => broken.push(format!("{what} uses memory that is not there")),
                Some(known) if bytes.end > known.bytes => {
                    broken.push(format!("{what} uses bytes {bytes:?} of {} of memory", known.bytes));
                }
                Some(known) => {
                    let meets = |old: &Access| old.bytes.start < bytes.end && bytes.start < old.bytes.end;
                    for old in known.accesses.iter().filter(|old| meets(old) && (old.writes || *writes)) {
                        // Parts of one piece of work are not ordered, but a kernel knows what it does.
                        if (old.stream, old.step) != (stream, step) && !clock.has(old.stream, old.step) {
                            broken.push(format!("{what} races {} for bytes {bytes:?}", old.what));
                        }
                    }
                    if *writes {
                        // Whoever is ordered after this is ordered after those before it.
                        known
                            .accesses
                            .retain(|old| !(bytes.start <= old.bytes.start && old.bytes.end <= bytes.end));
                    }
                    let (bytes, writes, what) = (bytes.clone(), *writes, what.to_string());
                    known.accesses.push(Access { bytes, writes, stream, step, what });
                }
            }
            broken.into_iter().for_each(|what| self.break_rule(&mut state, what));
        }
    }

    fn add(&self, memory: u64, bytes: usize) {
        self.state.lock().unwrap().memory.insert(memory, Memory { bytes, accesses: Vec::new() });
    }

    fn remove(&self, memory: u64) {
        let mut state = self.state.lock().unwrap();
        let host = state.clocks.entry(HOST).or_default().clone();
        let lost = self.left.load(Ordering::Relaxed) == 0;
        let Some(known) = state.memory.remove(&memory) else {
            return self.break_rule(&mut state, "memory is freed that is not there".to_string());
        };
        // A lost device has nothing under way.
        for access in known.accesses.iter().filter(|access| !lost && !host.has(access.stream, access.step)) {
            self.break_rule(&mut state, format!("memory is freed while {} may use it", access.what));
        }
    }
}

fn device(span: Span<DeviceMemory>, writes: bool) -> (u64, Range<usize>, bool) {
    (span.memory.0, span.at..span.at + span.bytes, writes)
}

fn host(span: Span<PinnedMemory>, writes: bool) -> (u64, Range<usize>, bool) {
    (span.memory.0, span.at..span.at + span.bytes, writes)
}

impl Driver for Recorder {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn free_memory(&self) -> Result<u64, DeviceError> {
        self.alive("free_memory")?;
        self.inner.free_memory()
    }

    fn alloc(&self, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        self.alive("alloc")?;
        let memory = self.inner.alloc(bytes)?;
        self.add(memory.0, bytes);
        Ok(memory)
    }

    fn free(&self, memory: DeviceMemory) {
        self.remove(memory.0);
        self.inner.free(memory);
    }

    fn pin(&self, bytes: usize) -> Result<PinnedMemory, DeviceError> {
        self.alive("pin")?;
        let memory = self.inner.pin(bytes)?;
        self.add(memory.0, bytes);
        Ok(memory)
    }

    fn unpin(&self, memory: PinnedMemory) {
        self.remove(memory.0);
        self.inner.unpin(memory);
    }

    fn write_pinned(&self, memory: PinnedMemory, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.touch(HOST, "the host's write", &[(memory.0, at..at + bytes.len(), true)]);
        self.inner.write_pinned(memory, at, bytes)
    }

    fn read_pinned(&self, memory: PinnedMemory, at: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        self.touch(HOST, "the host's read", &[(memory.0, at..at + out.len(), false)]);
        self.inner.read_pinned(memory, at, out)
    }

    fn stream(&self) -> Result<Stream, DeviceError> {
        self.alive("stream")?;
        let stream = self.inner.stream()?;
        self.state.lock().unwrap().clocks.insert(stream.0, Clock::default());
        Ok(stream)
    }

    fn end_stream(&self, stream: Stream) {
        self.state.lock().unwrap().clocks.remove(&stream.0);
        self.inner.end_stream(stream);
    }

    fn event(&self) -> Result<Event, DeviceError> {
        self.alive("event")?;
        let event = self.inner.event()?;
        self.state.lock().unwrap().events.insert(event.0, Clock::default());
        Ok(event)
    }

    fn end_event(&self, event: Event) {
        self.state.lock().unwrap().events.remove(&event.0);
        self.inner.end_event(event);
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), DeviceError> {
        self.alive("record")?;
        let mut state = self.state.lock().unwrap();
        let clock = state.clocks.get(&stream.0).cloned().unwrap_or_default();
        state.events.insert(event.0, clock);
        self.inner.record(event, stream)
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), DeviceError> {
        self.alive("wait")?;
        let mut state = self.state.lock().unwrap();
        let first = state.clocks.keys().filter(|stream| **stream != HOST).min().copied().unwrap_or(HOST);
        if self.deaf == Deaf::Stream(stream.0 - first) {
            return Ok(());
        }
        let clock = state.events.get(&event.0).cloned().unwrap_or_default();
        state.clocks.entry(stream.0).or_default().join(&clock);
        self.inner.wait(stream, event)
    }

    fn finish_event(&self, event: Event) -> Result<(), DeviceError> {
        self.alive("finish_event")?;
        if self.deaf == Deaf::Host {
            return Ok(());
        }
        let mut state = self.state.lock().unwrap();
        let clock = state.events.get(&event.0).cloned().unwrap_or_default();
        state.clocks.entry(HOST).or_default().join(&clock);
        self.inner.finish_event(event)
    }

    fn finish(&self, stream: Stream) -> Result<(), DeviceError> {
        self.alive("finish")?;
        let mut state = self.state.lock().unwrap();
        let clock = state.clocks.get(&stream.0).cloned().unwrap_or_default();
        state.clocks.entry(HOST).or_default().join(&clock);
        self.inner.finish(stream)
    }

    fn upload(
        &self,
        stream: Stream,
        from: Span<PinnedMemory>,
        to: Span<DeviceMemory>,
    ) -> Result<(), DeviceError> {
        self.alive("upload")?;
        assert_eq!(from.bytes, to.bytes);
        self.touch(stream.0, "a copy to the device", &[host(from, false), device(to, true)]);
        self.inner.upload(stream, from, to)
    }

    fn download(
        &self,
        stream: Stream,
        from: Span<DeviceMemory>,
        to: Span<PinnedMemory>,
    ) -> Result<(), DeviceError> {
        self.alive("download")?;
        assert_eq!(from.bytes, to.bytes);
        self.touch(stream.0, "a copy to the host", &[device(from, false), host(to, true)]);
        self.inner.download(stream, from, to)
    }

    fn copy(
        &self,
        stream: Stream,
        from: Span<DeviceMemory>,
        to: Span<DeviceMemory>,
    ) -> Result<(), DeviceError> {
        self.alive("copy")?;
        assert_eq!(from.bytes, to.bytes);
        self.touch(stream.0, "a copy on the device", &[device(from, false), device(to, true)]);
        self.inner.copy(stream, from, to)
    }

    fn zero(&self, stream: Stream, to: Span<DeviceMemory>) -> Result<(), DeviceError> {
        self.alive("zero")?;
        self.touch(stream.0, "filling with zeros", &[device(to, true)]);
        self.inner.zero(stream, to)
    }

    fn load(&self, code: &str) -> Result<Module, DeviceError> {
        self.alive("load")?;
        self.inner.load(code)
    }

    fn function(&self, module: Module, name: &str) -> Result<Function, DeviceError> {
        self.alive("function")?;
        let function = self.inner.function(module, name)?;
        self.state.lock().unwrap().functions.insert(function, name.to_string());
        Ok(function)
    }

    fn launch(&self, stream: Stream, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.alive("launch")?;
        let name = self.state.lock().unwrap().functions[&launch.function].clone();
        let [x, y, z] = launch.grid;
        assert!(
            x > 0 && x < 1 << 31 && (1..65_536).contains(&y) && (1..65_536).contains(&z),
            "{name}: {:?}",
            launch.grid
        );
        assert!((1..=1024).contains(&launch.threads) && launch.threads.is_multiple_of(32), "{name}");
        let parts: Vec<_> = launch
            .args
            .iter()
            .filter_map(|arg| match *arg {
                Arg::Read(span) => Some(device(span, false)),
                Arg::Write(span) | Arg::Change(span) => Some(device(span, true)),
                _ => None,
            })
            .collect();
        self.touch(stream.0, &name, &parts);
        self.state.lock().unwrap().launches.push(name);
        self.inner.launch(stream, launch)
    }
}
