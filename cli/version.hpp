// Which source the command was built from.
#pragma once

namespace mla::cli {

/// The commit's first digits, with "+changes" when files differed from it; "unknown" where the source was no checkout.
const char* commit();

}  // namespace mla::cli
