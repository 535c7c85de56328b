//! Leases: counted, expiring claims that keep cells from being dropped.
//!
//! They live in memory only: a claim dies with the process that made it. A lease is soft by its time limit: once it
//! has expired, pressure wins. Knows ids, not cells.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::clock::Clock;
use crate::limits::{MAX_LEASE_MS, MAX_LEASED};
use crate::packs::CellId;
use crate::sync::lock;

/// Why a lease was not given.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// Too many claims are held.
    #[error(
        "{held} cells are leased and {asked} more are asked for, over the limit of {limit}: release some first"
    )]
    TooMany {
        /// Claims held now.
        held: usize,
        /// Claims asked for.
        asked: usize,
        /// Claims allowed.
        limit: usize,
    },
}

#[derive(Default)]
struct Claims {
    /// For each cell the leases that claim it, with the monotonic millisecond at which each expires.
    cells: HashMap<CellId, Vec<(u64, u64)>>,
    count: usize,
    next: u64,
}

impl Claims {
    fn release(&mut self, lease: u64, ids: &[CellId]) {
        for id in ids {
            if let Some(claims) = self.cells.get_mut(id) {
                let before = claims.len();
                claims.retain(|(l, _)| *l != lease);
                self.count -= before - claims.len();
                if claims.is_empty() {
                    self.cells.remove(id);
                }
            }
        }
    }

    fn drop_expired(&mut self, now: u64) {
        let count = &mut self.count;
        self.cells.retain(|_, claims| {
            let before = claims.len();
            claims.retain(|(_, until)| *until > now);
            *count -= before - claims.len();
            !claims.is_empty()
        });
    }
}

/// The claims of one store. Cloning shares them.
#[derive(Clone)]
pub struct LeaseStore {
    clock: Arc<dyn Clock>,
    claims: Arc<Mutex<Claims>>,
}

/// A claim on cells. Dropping it releases it.
pub struct Lease {
    store: LeaseStore,
    number: u64,
    ids: Vec<CellId>,
    until: u64,
}

impl LeaseStore {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, claims: Arc::default() }
    }

    /// Claims cells for `ttl` (at most [`MAX_LEASE_MS`]). A claim may name cells that do not exist yet. Several leases
    /// may claim one cell; it is free when all are gone.
    ///
    /// # Errors
    /// [`LeaseError::TooMany`] over [`MAX_LEASED`] claims.
    pub fn acquire(&self, ids: &[CellId], ttl: Duration) -> Result<Lease, LeaseError> {
        let now = self.clock.monotonic_ms();
        let until = now.saturating_add(capped(ttl));
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        let mut claims = lock(&self.claims);
        if claims.count + ids.len() > MAX_LEASED {
            claims.drop_expired(now);
        }
        if claims.count + ids.len() > MAX_LEASED {
            return Err(LeaseError::TooMany { held: claims.count, asked: ids.len(), limit: MAX_LEASED });
        }
        claims.next += 1;
        let number = claims.next;
        claims.count += ids.len();
        for id in &ids {
            claims.cells.entry(*id).or_default().push((number, until));
        }
        Ok(Lease { store: self.clone(), number, ids, until })
    }

    /// Whether any unexpired lease claims the cell.
    pub fn is_leased(&self, id: &CellId) -> bool {
        let now = self.clock.monotonic_ms();
        lock(&self.claims).cells.get(id).is_some_and(|claims| claims.iter().any(|(_, until)| *until > now))
    }

    /// Claims held, expired ones included until they are cleared away.
    pub fn count(&self) -> usize {
        lock(&self.claims).count
    }
}

fn capped(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).min(MAX_LEASE_MS)
}

impl Lease {
    /// The cells it claims, sorted.
    pub fn ids(&self) -> &[CellId] {
        &self.ids
    }

    /// Whether its time has passed: its cells may be dropped now.
    pub fn is_expired(&self) -> bool {
        self.store.clock.monotonic_ms() >= self.until
    }

    /// Claims the cells again for `ttl` from now. If the lease had expired, cells may be gone already.
    pub fn renew(&mut self, ttl: Duration) {
        self.until = self.store.clock.monotonic_ms().saturating_add(capped(ttl));
        let mut claims = lock(&self.store.claims);
        for id in &self.ids {
            let entry = claims.cells.entry(*id).or_default();
            match entry.iter_mut().find(|(lease, _)| *lease == self.number) {
                Some(claim) => claim.1 = self.until,
                None => {
                    entry.push((self.number, self.until));
                    claims.count += 1;
                }
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        lock(&self.store.claims).release(self.number, &self.ids);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    fn id(n: u32) -> CellId {
        let mut id = [0; 32];
        id[..4].copy_from_slice(&n.to_le_bytes());
        id
    }

    #[test]
    fn i9_claims_are_counted_and_expire() {
        let clock = Arc::new(ManualClock::new(0));
        let leases = LeaseStore::new(Arc::<ManualClock>::clone(&clock));
        let first = leases.acquire(&[id(1), id(1), id(2)], Duration::from_millis(100)).unwrap();
        let mut second = leases.acquire(&[id(1)], Duration::from_millis(300)).unwrap();
        assert_eq!(leases.count(), 3);
        drop(first);
        assert!(leases.is_leased(&id(1)) && !leases.is_leased(&id(2)));
        clock.advance(300);
        assert!(second.is_expired() && !leases.is_leased(&id(1)));
        second.renew(Duration::from_millis(10));
        assert!(leases.is_leased(&id(1)));
        drop(second);
        assert_eq!(leases.count(), 0);
    }

    #[test]
    fn i8_claims_are_bounded_and_expired_ones_make_room() {
        let clock = Arc::new(ManualClock::new(0));
        let leases = LeaseStore::new(Arc::<ManualClock>::clone(&clock));
        let all: Vec<CellId> = (0..MAX_LEASED as u32).map(id).collect();
        let held = leases.acquire(&all, Duration::from_secs(1)).unwrap();
        let refused = leases.acquire(&[id(u32::MAX)], Duration::from_secs(1)).err();
        assert_eq!(refused, Some(LeaseError::TooMany { held: MAX_LEASED, asked: 1, limit: MAX_LEASED }));
        clock.advance(1000);
        assert!(leases.acquire(&[id(u32::MAX)], Duration::from_secs(1)).is_ok());
        drop(held);
        assert_eq!(leases.count(), 0);
    }
}
