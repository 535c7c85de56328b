//! What tenants hold of the device, and making room within a quota.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use kernels::backend::Backend;

use super::order::Shares;
use super::{Tenant, TenantView};
use crate::error::{Error, ErrorKind};
use crate::kv::table::Need;
use crate::scheduler::sequence::Sequence;
use crate::scheduler::worker::{Job, Phase, Worker};

/// What became of a job that asked to be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::scheduler) enum Admission {
    /// It has its pages.
    Admitted,
    /// Its tenant's quota has no room for it now; the device may have.
    TenantFull,
    /// The device has no room now.
    DeviceFull,
}

impl<B: Backend> Worker<B> {
    /// Pages of some sessions; those that several of them share are counted once. Tenants share none.
    fn pages_of<'a>(&self, sequences: impl Iterator<Item = &'a Sequence>) -> usize {
        let mut shared = HashSet::new();
        sequences
            .flat_map(|sequence| sequence.table.all())
            .filter(|page| !self.pool.is_shared(**page) || shared.insert(**page))
            .count()
    }

    fn sessions_by_tenant(&self) -> HashMap<Tenant, Vec<&Sequence>> {
        let mut sessions: HashMap<Tenant, Vec<&Sequence>> = HashMap::new();
        for sequence in self.sequences.values() {
            sessions.entry(sequence.tenant.clone()).or_default().push(sequence);
        }
        sessions
    }

    /// The tenant of a session.
    pub(in crate::scheduler) fn tenant_of(&self, session: &str) -> Tenant {
        self.sequences.get(session).map(|sequence| sequence.tenant.clone()).unwrap_or_default()
    }

    /// Shares of the device, in pages, where a session wants so many more, or nobody does.
    pub(in crate::scheduler) fn device_shares(&self, wanted: Option<(&str, usize)>) -> Shares {
        let wanted = wanted.map(|(session, pages)| (self.tenant_of(session), pages as u64));
        let sessions = self.sessions_by_tenant();
        let held = sessions
            .into_iter()
            .map(|(tenant, sequences)| (tenant, self.pages_of(sequences.into_iter()) as u64));
        Shares::new(self.pool.total() as u64, held, wanted.as_ref().map(|(tenant, pages)| (tenant, *pages)))
    }

    /// Pages that a tenant may have.
    fn quota_pages(&self, tenant: &Tenant) -> Option<usize> {
        let bytes = self.options.tenants.of(tenant).device_bytes?;
        let pages = bytes / self.engine.pool_spec().page_bytes() as u64;
        Some(usize::try_from(pages).unwrap_or(usize::MAX))
    }

    /// Pages by which a session's tenant would pass its quota if the session had what it needs.
    pub(in crate::scheduler) fn over_quota(&self, session: &str, need: Need) -> usize {
        let Some(sequence) = self.sequences.get(session) else { return 0 };
        let Some(quota) = self.quota_pages(&sequence.tenant) else { return 0 };
        match sequence.table.pages_wanted(&self.pool, need) {
            0 => 0,
            wanted => {
                let own = self.sequences.values().filter(|other| other.tenant == sequence.tenant);
                (self.pages_of(own) + wanted).saturating_sub(quota)
            }
        }
    }

    /// Makes room within the quota of a session's tenant, among the tenant's own sessions; whether there is room now.
    pub(in crate::scheduler) fn make_tenant_room(&mut self, session: &Arc<str>, need: Need) -> bool {
        let tenant = self.tenant_of(session);
        loop {
            let over = self.over_quota(session, need);
            if over == 0 {
                return true;
            }
            let mut own = self.victims(session);
            own.retain(|(other, _)| *other == tenant);
            let most: usize = own
                .iter()
                .filter_map(|(_, victim)| self.sequences.get(&victim.session))
                .map(|sequence| sequence.table.all().count())
                .sum();
            if most >= over {
                for (_, victim) in own {
                    if self.over_quota(session, need) == 0 {
                        break;
                    }
                    self.evict(&victim.session, "pressure");
                }
                return self.over_quota(session, need) == 0;
            }
            if !self.give_up_prefetch(session, Some(&tenant)) {
                return false;
            }
        }
    }

    /// Refuses what is larger than the quota of its tenant.
    pub(in crate::scheduler) fn fits_quota(&self, session: &str, tokens: usize) -> Result<(), Error> {
        let tenant = self.tenant_of(session);
        let (Some(quota), pages) = (self.quota_pages(&tenant), self.shape.pages_most(tokens)) else {
            return Ok(());
        };
        if pages <= quota {
            return Ok(());
        }
        let page_bytes = self.engine.pool_spec().page_bytes();
        let bytes = self.options.tenants.of(&tenant).device_bytes.unwrap_or_default();
        let option = tenant.name().filter(|name| self.options.tenants.named.contains_key(*name));
        Err(Error::new(
            ErrorKind::Limit,
            "tenant_quota",
            format!(
                "session '{session}' needs {} bytes of KV for {tokens} tokens and the device quota of {tenant} is {bytes} \
                 bytes: start with a larger --tenant-quota '{}:device=BYTES'",
                pages * page_bytes,
                option.unwrap_or("*"),
            ),
        ))
    }

    /// What every tenant has, by name.
    pub(in crate::scheduler) fn tenants(&self) -> Vec<TenantView> {
        let page_bytes = self.engine.pool_spec().page_bytes() as u64;
        let waits = |job: &&Job| matches!(job.phase, Phase::Waiting);
        let sessions: BTreeMap<_, _> = self.sessions_by_tenant().into_iter().collect();
        let view = |(tenant, sequences): (Tenant, Vec<&Sequence>)| {
            let quota = self.options.tenants.of(&tenant);
            TenantView {
                name: tenant.name().map(str::to_owned),
                sessions: sequences.len() as u64,
                waiting: self.jobs.iter().filter(waits).filter(|job| job.tenant == tenant).count() as u64,
                device_bytes: self.pages_of(sequences.into_iter()) as u64 * page_bytes,
                device_quota_bytes: quota.device_bytes,
                host_bytes: self.host.held_by(&tenant),
                host_quota_bytes: quota.host_bytes,
                disk_bytes: self.tier.held_by(&tenant.owner()),
                disk_quota_bytes: quota.disk_bytes,
            }
        };
        sessions.into_iter().map(view).collect()
    }
}
