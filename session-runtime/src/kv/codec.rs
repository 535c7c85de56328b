//! How a session's KV is packed once it leaves the device.

use kernels::codec::Codec;
use serde::{Deserialize, Serialize};

use super::chunk::Chunk;

/// How the cells of a session are packed. What `int8` and `int4` lose is lost for good, so that only a session that asks for one
/// gets it: after a restore it goes on near where it would have, not exactly there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KvCodec {
    /// As on the device: a restored session continues exactly.
    #[default]
    Raw,
    /// Older tokens in eight bits a value.
    Int8,
    /// Older tokens in four bits a value.
    Int4,
    /// In as few bytes as a compressor finds: a restored session continues exactly.
    Lossless,
}

impl KvCodec {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Raw, Self::Int8, Self::Int4, Self::Lossless];

    /// The codec with a loss, where it is one.
    pub fn lossy(self) -> Option<Codec> {
        match self {
            Self::Raw | Self::Lossless => None,
            Self::Int8 => Some(Codec::Int8),
            Self::Int4 => Some(Codec::Int4),
        }
    }

    /// How a chunk is kept. Only settled ones lose anything, so that the newest tokens are as they were computed.
    #[must_use]
    pub fn of_chunk(self, chunk: &Chunk) -> Self {
        if chunk.is_settled() || self.lossy().is_none() { self } else { Self::Raw }
    }

    /// Its name: `raw`, `int8`, `int4` or `lossless`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Lossless => "lossless",
        }
    }

    /// Its number in the headers of saved cells.
    pub fn number(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Int8 => 1,
            Self::Int4 => 2,
            Self::Lossless => 3,
        }
    }
}

impl std::str::FromStr for KvCodec {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|codec| codec.name() == name);
        named.ok_or_else(|| format!("'{name}' is not a codec of KV: use raw, lossless, int8 or int4"))
    }
}
