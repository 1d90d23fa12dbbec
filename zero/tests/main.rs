//! zero as a user sees it; one binary, since Burn is slow to link.
