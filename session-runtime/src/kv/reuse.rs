//! What saved KV a session takes for its own.

use serde::{Deserialize, Serialize};

/// Whether a session's KV is always what would be computed, or may be near it where that saves computing it again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KvReuse {
    /// What would be computed: a session continues exactly, and what cannot be used is computed again.
    #[default]
    Exact,
    /// Near it. What follows a cut keeps its values, and its keys are turned to their new positions; KV of another device, rounding
    /// or type of element is converted.
    Approximate,
}

impl KvReuse {
    /// Its name: `exact` or `approximate`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Approximate => "approximate",
        }
    }
}

impl std::str::FromStr for KvReuse {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "exact" => Ok(Self::Exact),
            "approximate" => Ok(Self::Approximate),
            other => Err(format!("'{other}' is not a way to reuse KV: use exact or approximate")),
        }
    }
}
