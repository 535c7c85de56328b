//! In how many bits a session's KV is kept once it leaves the device.

use kernels::codec::Codec;
use serde::{Deserialize, Serialize};

/// How the cells of a session are packed. What a codec loses is lost for good, so that only a session that asks for one gets it:
/// after a restore it goes on near where it would have, not exactly there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KvCodec {
    /// As on the device: a restored session continues exactly.
    #[default]
    Raw,
    /// Sealed chunks in eight bits a value.
    Int8,
    /// Sealed chunks in four bits a value.
    Int4,
}

impl KvCodec {
    /// The codec, where there is one.
    pub fn codec(self) -> Option<Codec> {
        match self {
            Self::Raw => None,
            Self::Int8 => Some(Codec::Int8),
            Self::Int4 => Some(Codec::Int4),
        }
    }

    /// Its name: `raw`, `int8` or `int4`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Its number in the headers of saved cells.
    pub fn number(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Int8 => 1,
            Self::Int4 => 2,
        }
    }
}

impl std::str::FromStr for KvCodec {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "raw" => Ok(Self::Raw),
            "int8" => Ok(Self::Int8),
            "int4" => Ok(Self::Int4),
            other => Err(format!("'{other}' is not a codec of KV: use raw, int8 or int4")),
        }
    }
}
