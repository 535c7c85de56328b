//! Whose turn it is: round robin among tenants that wait. One that begins to wait goes to the end, so that it overtakes nobody
//! there, and each of the others goes before it at most once.

use std::collections::VecDeque;

use super::Tenant;

/// The tenants that wait, in the order of their turns.
#[derive(Debug, Default)]
pub(in crate::scheduler) struct Turns {
    ring: VecDeque<Tenant>,
}

impl Turns {
    /// Told who waits, the oldest first; a tenant may be named more than once.
    pub(in crate::scheduler) fn waiting<'a>(&mut self, tenants: impl IntoIterator<Item = &'a Tenant>) {
        let mut fresh: Vec<&Tenant> = Vec::new();
        let mut still = vec![false; self.ring.len()];
        for tenant in tenants {
            match self.ring.iter().position(|known| known == tenant) {
                Some(place) => still[place] = true,
                None if fresh.contains(&tenant) => {}
                None => fresh.push(tenant),
            }
        }
        let mut still = still.into_iter();
        self.ring.retain(|_| still.next().unwrap_or(false));
        self.ring.extend(fresh.into_iter().cloned());
    }

    /// Whose turn is next, but for those who cannot take it.
    pub(in crate::scheduler) fn next(&self, except: &[Tenant]) -> Option<Tenant> {
        self.ring.iter().find(|tenant| !except.contains(tenant)).cloned()
    }

    /// A tenant had its turn.
    pub(in crate::scheduler) fn taken(&mut self, tenant: &Tenant) {
        if let Some(place) = self.ring.iter().position(|known| known == tenant)
            && let Some(tenant) = self.ring.remove(place)
        {
            self.ring.push_back(tenant);
        }
    }
}
