# PostgreSQL's official image with the extension:
#
#   docker build --build-arg PG_MAJOR=17 --tag postgres-idempotency:17 .
#
# and an image of the extension alone, for a volume of a server that has its
# image already (PostgreSQL 18 and later, extension_control_path):
#
#   docker build --target extension --tag idempotency:1.0-18 .
#
# Not for the images on Alpine: see doc/packagers.md.
ARG PG_MAJOR=18

FROM postgres:${PG_MAJOR} AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc make "postgresql-server-dev-$PG_MAJOR"
COPY . /src
RUN make -C /src with_llvm=no DESTDIR=/installed all install
RUN make -C /src with_llvm=no DESTDIR=/extension pkglibdir=/lib datadir=/share install

FROM scratch AS extension
COPY --from=build /extension /

FROM postgres:${PG_MAJOR}
COPY --from=build /installed /
