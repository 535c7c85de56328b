//! The order in which a tier is made room on. No clock, no bytes, no pages: amounts are whatever the tier counts in.

use std::collections::{HashMap, VecDeque};

use super::Tenant;

/// What each tenant has of a tier, and the share that each may count on.
#[derive(Clone, Debug)]
pub(in crate::scheduler) struct Shares {
    held: HashMap<Tenant, u64>,
    share: u64,
}

impl Shares {
    /// Shares of a tier that holds `budget`, for one who wants `wanted` more. What it wants counts as held: who asks beyond its
    /// share makes room among its own before it takes from those who are within theirs.
    pub(in crate::scheduler) fn new(
        budget: u64,
        held: impl IntoIterator<Item = (Tenant, u64)>,
        wanted: Option<(&Tenant, u64)>,
    ) -> Self {
        let mut sums: HashMap<Tenant, u64> = HashMap::new();
        for (tenant, amount) in held.into_iter().filter(|(_, amount)| *amount > 0) {
            *sums.entry(tenant).or_default() += amount;
        }
        if let Some((tenant, amount)) = wanted {
            *sums.entry(tenant.clone()).or_default() += amount;
        }
        let share = budget / (sums.len().max(1) as u64);
        Self { held: sums, share }
    }

    /// Whether a tenant has more than its share.
    pub(in crate::scheduler) fn is_above(&self, tenant: &Tenant) -> bool {
        self.held.get(tenant).is_some_and(|held| *held > self.share)
    }

    /// Something of a tenant's has left.
    pub(in crate::scheduler) fn left(&mut self, tenant: &Tenant, amount: u64) {
        if let Some(held) = self.held.get_mut(tenant) {
            *held = held.saturating_sub(amount);
        }
    }
}

/// Candidates for leaving, given by price, in the order in which they are to leave. What a tenant has only shrinks while room
/// is made, so that whoever was passed over as within its share stays so: one pass over those above, then one over the rest.
pub(in crate::scheduler) struct Leaving<I, T> {
    by_price: I,
    passed_over: VecDeque<(Tenant, T)>,
}

impl<T, I: Iterator<Item = (Tenant, T)>> Leaving<I, T> {
    /// The candidates, the cheapest first.
    pub(in crate::scheduler) fn new(by_price: I) -> Self {
        Self { by_price, passed_over: VecDeque::new() }
    }

    /// Who leaves next.
    pub(in crate::scheduler) fn next(&mut self, shares: &Shares) -> Option<(Tenant, T)> {
        for candidate in self.by_price.by_ref() {
            if shares.is_above(&candidate.0) {
                return Some(candidate);
            }
            self.passed_over.push_back(candidate);
        }
        self.passed_over.pop_front()
    }
}
