//! How much of each tier a tenant may take, as an operator says it, and how much it has taken.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Tenant;

/// The most bytes of KV that a tenant may have on each tier; unset: as many as the tier has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantQuota {
    /// Bytes of pages on the device.
    pub device_bytes: Option<u64>,
    /// Bytes of cells in host memory.
    pub host_bytes: Option<u64>,
    /// Bytes of cells on disk, with what each takes beside its content.
    pub disk_bytes: Option<u64>,
}

/// The quotas of all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantQuotas {
    /// By the tenant's name.
    pub named: BTreeMap<String, TenantQuota>,
    /// Of each tenant that has none of its own, that of sessions that name no tenant included.
    pub others: TenantQuota,
}

impl TenantQuotas {
    /// The quota of a tenant.
    pub fn of(&self, tenant: &Tenant) -> TenantQuota {
        tenant.name().and_then(|name| self.named.get(name)).copied().unwrap_or(self.others)
    }
}

/// What a tenant has on each tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct TenantView {
    /// Name; absent for the sessions that name no tenant.
    pub name: Option<String>,
    /// Sessions.
    pub sessions: u64,
    /// Jobs that wait for room on the device.
    pub waiting: u64,
    /// Bytes of pages on the device; pages that several of its sessions share are counted once.
    pub device_bytes: u64,
    /// The most there may be; absent without a quota.
    pub device_quota_bytes: Option<u64>,
    /// Bytes of cells in host memory.
    pub host_bytes: u64,
    /// The most there may be; absent without a quota.
    pub host_quota_bytes: Option<u64>,
    /// Bytes of cells on disk, with what each takes beside its content, those of deleted sessions included.
    pub disk_bytes: u64,
    /// The most there may be; absent without a quota.
    pub disk_quota_bytes: Option<u64>,
}
