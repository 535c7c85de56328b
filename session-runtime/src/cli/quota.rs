//! Quotas of tenants as people write them: `acme:device=256MiB,host=64MiB`, and `*` for every tenant without one.

use std::str::FromStr;

use super::bytes::Bytes;
use super::failure::{Failure, Outcome};
use crate::ids;
use crate::scheduler::tenants::{TenantQuota, TenantQuotas};

/// One `--tenant-quota`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct QuotaOption {
    /// The tenant's name; `None`: every tenant without a quota of its own.
    tenant: Option<String>,
    quota: TenantQuota,
}

impl FromStr for QuotaOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "write NAME:device=BYTES,host=BYTES,disk=BYTES with one tier or more, such as acme:device=256MiB, or * for NAME";
        let (name, tiers) = text.split_once(':').ok_or(form)?;
        let tenant = match name {
            "*" => None,
            name if ids::is_valid(name) => Some(name.to_owned()),
            name => return Err(format!("'{name}' is no tenant's name: {form}")),
        };
        let mut quota = TenantQuota::default();
        for part in tiers.split(',') {
            let (tier, bytes) = part.split_once('=').ok_or(form)?;
            let place = match tier {
                "device" => &mut quota.device_bytes,
                "host" => &mut quota.host_bytes,
                "disk" => &mut quota.disk_bytes,
                other => return Err(format!("'{other}' is no tier: {form}")),
            };
            if place.is_some() {
                return Err(format!("the {tier} is named twice: {form}"));
            }
            let Bytes(bytes) = bytes.parse()?;
            *place = Some(bytes);
        }
        Ok(Self { tenant, quota })
    }
}

/// The quotas that options give together.
pub(super) fn quotas(options: &[QuotaOption]) -> Outcome<TenantQuotas> {
    let mut quotas = TenantQuotas::default();
    for (place, QuotaOption { tenant, quota }) in options.iter().enumerate() {
        if options[..place].iter().any(|earlier| earlier.tenant == *tenant) {
            let name = tenant.as_deref().unwrap_or("*");
            let message = format!(
                "--tenant-quota names {name} twice: give all its tiers in one, as device=BYTES,host=BYTES"
            );
            return Err(Failure::usage(message));
        }
        match tenant {
            Some(name) => drop(quotas.named.insert(name.clone(), *quota)),
            None => quotas.others = *quota,
        }
    }
    Ok(quotas)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_read_by_tier() {
        let read = |text: &str| text.parse::<QuotaOption>().unwrap();
        let options =
            [read("acme:device=1KiB,disk=3KiB,host=2KiB"), read("b.c:host=0"), read("*:device=4096")];
        let quotas = quotas(&options).unwrap();
        let quota =
            |device_bytes, host_bytes, disk_bytes| TenantQuota { device_bytes, host_bytes, disk_bytes };
        assert_eq!(quotas.named["acme"], quota(Some(1024), Some(2048), Some(3072)));
        assert_eq!(quotas.named["b.c"], quota(None, Some(0), None));
        assert_eq!(quotas.others, quota(Some(4096), None, None));
    }

    #[test]
    fn what_is_no_quota_is_refused_with_the_form() {
        for (text, says) in [
            ("acme", "write NAME:device=BYTES"),
            ("acme:", "write NAME:device=BYTES"),
            ("a/b:device=1", "'a/b' is no tenant's name"),
            ("acme:remote=1", "'remote' is no tier"),
            ("acme:device=1,device=2", "the device is named twice"),
            ("acme:device=many", "'many' is not an amount of bytes"),
        ] {
            let refused = text.parse::<QuotaOption>().unwrap_err();
            assert!(refused.contains(says), "{text}: {refused}");
        }
        let twice = ["a:device=1", "a:host=1"].map(|text| text.parse().unwrap());
        assert!(quotas(&twice).unwrap_err().to_string().contains("names a twice"));
    }
}
