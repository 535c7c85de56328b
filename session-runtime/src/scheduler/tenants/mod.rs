//! Tenants: whose KV leaves first, how much of a tier each may take, and whose turn it is.
//!
//! Under pressure on a tier, what belongs to tenants above their fair share leaves first, the cheapest first, then the rest by
//! price. A share is the tier divided by the tenants that have something there; what one leaves unused is anyone's. A quota
//! is a hard bound: who would pass it makes room among its own or waits, and never takes anything of another tenant. Jobs are
//! admitted in turn among tenants, the oldest first within each.
//!
//! Tenants share no cells and no pages: each has a contract of its own. Sessions that name no tenant are one together.

mod holding;
mod order;
mod quota;
mod turns;

use std::fmt;
use std::sync::Arc;

use store::OwnerId;

pub(super) use holding::Admission;
pub(super) use order::{Leaving, Shares};
pub use quota::{TenantQuota, TenantQuotas, TenantView};
pub(super) use turns::Turns;

/// Whose a session is. The default is the tenant of all sessions that name none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(Option<Arc<str>>);

impl Tenant {
    /// The tenant of this name; without one, that of all sessions that name none.
    pub fn named(name: Option<&str>) -> Self {
        Self(name.map(Arc::from))
    }

    /// What the disk knows it by. No tenant's name is a number: the first bytes of a digest of it stand for it.
    pub(super) fn owner(&self) -> OwnerId {
        let mut owner = OwnerId::default();
        if let Some(name) = self.name() {
            let digest = blake3::derive_key("session-runtime tenant 1", name.as_bytes());
            owner.iter_mut().zip(digest).for_each(|(byte, of_digest)| *byte = of_digest);
        }
        owner
    }

    /// Its name.
    pub fn name(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(out, "tenant '{name}'"),
            None => out.write_str("the tenant of sessions that name none"),
        }
    }
}

#[cfg(test)]
mod tests;
