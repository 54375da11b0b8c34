-- The second ledger, first half: from one day's charges and usage to hour parts, spans and vectors, in integers.
-- witness_money.sql goes on from here. Shares no code with tasks/core; knows no file and no clock.
-- Source: infra/rules/ledger.md 1 to 4, which the sections below name.
--
-- In (registered by tasks/witness.py; instants are BIGINT ns UTC, money whole units of 10^-digits, quantities and prices
-- whole units of 1e-12, both as DECIMAL(38, 0)): settings_in, charges_in, device_in, layer_in, attach_in, counts_in, prices_in, regions_in,
-- marks_in, alphas_in, contracted_in.
-- Out: charge, part, machine_hour, hanging, volume, joint, vector, w_spans.
-- HUGEINT arithmetic raises on overflow; // cuts toward zero, so it only ever sees amounts without their sign.

SET TimeZone = 'UTC';
SET default_null_order = 'nulls_last';
SET preserve_insertion_order = false;

-- === Numbers (sections 1, 4.4, 4.10) ================================================================================

-- floor(u * w / t) and its remainder. u * w can pass 2^127, so u is taken apart: u = (u // t) * t + u % t.
CREATE TEMP MACRO whole_share(u, w, t) AS (u // t) * w + ((u % t) * w) // t;
CREATE TEMP MACRO rest_share(u, w, t) AS ((u % t) * w) % t;

-- The part of amount u (either sign) in [a, b) of t: it telescopes to u over adjoining intervals (4.4).
CREATE TEMP MACRO telescoped(u, a, b, t) AS sign(u) * (whole_share(abs(u), b, t) - whole_share(abs(u), a, t));

-- n / d rounded half to even; n is not negative.
CREATE TEMP MACRO half_even(n, d) AS
    n // d + CASE WHEN 2 * (n % d) > d OR (2 * (n % d) = d AND (n // d) % 2 = 1) THEN 1 ELSE 0 END;

-- Nanoseconds of a unit of time; null for every other unit. Of a meter that counts parts of a machine (4.6), an hour of a
-- core, a GPU or a GiB is an hour too.
CREATE TEMP MACRO unit_ns(unit, of_parts) AS CASE
    WHEN regexp_full_match(lower(trim(unit)), 'hours?|hrs?|h') THEN 3600000000000
    WHEN regexp_full_match(lower(trim(unit)), 'minutes?') THEN 60000000000
    WHEN regexp_full_match(lower(trim(unit)), 'seconds?') THEN 1000000000
    WHEN of_parts AND regexp_full_match(lower(trim(unit)),
                                        'gibibyte hours?|giby\.h|gib[- ]hours?|vcpu-hours?|core-hours?|gpu-hours?')
         THEN 3600000000000 END;

-- Time of a row over the parts that one machine has, in 1e-12 ns, half to even; parts are in 1e-12 too. Time times 10^12 can
-- pass 2^127, so it is taken apart like a share: whole multiples of 10^12 are even and do not turn the rounding.
CREATE TEMP MACRO machine_time(t, parts) AS CASE WHEN parts IS NULL THEN t
    ELSE sign(t) * ((abs(t) // parts) * 1000000000000 + half_even((abs(t) % parts) * 1000000000000, parts)) END;

-- Largest remainder over a table of (grp, pos, units, weight): units of a group over its weights, the odd units to the
-- largest remainders, ties to the lowest pos. The weights of a group never add up to zero; the caller sees to it.
CREATE TEMP MACRO largest_remainder(t) AS TABLE
    WITH summed AS (
        SELECT grp, pos, units, weight, sum(weight) OVER (PARTITION BY grp) AS total FROM query_table(t)
    ), based AS (
        SELECT grp, pos, units, whole_share(abs(units), weight, total) AS base,
               rest_share(abs(units), weight, total) AS rest
        FROM summed
    ), ranked AS (
        SELECT grp, pos, units, base, abs(units) - sum(base) OVER (PARTITION BY grp) AS spare,
               row_number() OVER (PARTITION BY grp ORDER BY rest DESC, pos) AS turn
        FROM based
    )
    SELECT grp, pos, sign(units) * (base + CASE WHEN turn <= spare THEN 1 ELSE 0 END) AS part FROM ranked;

-- === Observed time ==================================================================================================

-- A device that is on no known machine has no address; a row without time observed nothing. A machine is an id within a cloud.
CREATE TEMP TABLE observed AS
    SELECT cloud, instance_id AS machine, hour_utc AS hour, device_uuid AS device, job_id AS job, attempt, rank, category,
           sum(ns)::BIGINT AS ns, min(instance_type) AS itype, min(parent_uuid) AS parent, max(mig_slices) AS slices,
           max(mig_total) AS slices_of_gpu
    FROM device_in WHERE cloud IS NOT NULL AND instance_id IS NOT NULL AND ns > 0
    GROUP BY ALL;

CREATE TEMP TABLE seen AS
    SELECT row_number() OVER () AS did, *
    FROM (SELECT cloud, machine, hour, device, sum(ns)::BIGINT AS ns, min(itype) AS itype, min(parent) AS parent,
                 max(slices) AS slices, max(slices_of_gpu) AS slices_of_gpu
          FROM observed GROUP BY ALL);

-- Running time of a machine in an hour: the most that one of its devices was observed. GPUs: the slices of one are one.
CREATE TEMP TABLE running AS
    SELECT cloud, machine, hour, max(ns) AS ns, count(DISTINCT coalesce(parent, device)) AS gpus, min(itype) AS itype
    FROM seen GROUP BY ALL;

-- === Rule 1: categories 1 to 6, the tie, categories 7 to 13 (section 3) =============================================

CREATE TEMP TABLE charge AS
    WITH today AS (
        -- HUGEINT from here on: // on a decimal is no integer division
        SELECT c.* REPLACE (x_DayBilledCost::HUGEINT AS x_DayBilledCost, x_DayEffectiveCost::HUGEINT AS x_DayEffectiveCost,
                            x_DayListCost::HUGEINT AS x_DayListCost, BilledCost::HUGEINT AS BilledCost,
                            x_DayPromotionalCost::HUGEINT AS x_DayPromotionalCost,
                            x_PromotionalCost::HUGEINT AS x_PromotionalCost,
                            EffectiveCost::HUGEINT AS EffectiveCost, ListCost::HUGEINT AS ListCost,
                            ConsumedQuantity::HUGEINT AS ConsumedQuantity, PricingQuantity::HUGEINT AS PricingQuantity,
                            x_UnitsPerMachine::HUGEINT AS x_UnitsPerMachine),
            s.day_ns, s.day_ns + 86400000000000 AS next_ns,
            CASE WHEN ChargeCategory = 'Tax' THEN 'tax'
                 WHEN x_Class IN ('rounding', 'commitment_unused') THEN x_Class
                 WHEN ChargeCategory = 'Purchase'
                      AND (CommitmentDiscountId IS NOT NULL OR CapacityReservationId IS NOT NULL) THEN 'commitment_purchase'
                 WHEN CommitmentDiscountStatus = 'Unused' THEN 'commitment_unused'
                 WHEN CapacityReservationStatus = 'Unused' OR contains(x_UsageType, 'UnusedBox')
                      OR contains(x_UsageType, 'UnusedDed') OR x_Class = 'capacity_unused' THEN 'capacity_unused'
                 WHEN x_Class = 'support' THEN 'support' END AS early,
            coalesce(ChargeFrequency = 'Usage-Based', false) AS usage_based,
            ChargePeriodEnd - ChargePeriodStart AS length,
            greatest(ChargePeriodStart, s.day_ns) AS since,
            least(ChargePeriodEnd, s.day_ns + 86400000000000) AS until,
            ChargeCategory = 'Usage' AND ChargeClass IS NULL AND BilledCost >= 0 AND EffectiveCost >= 0 AS plain
        FROM charges_in c CROSS JOIN settings_in s WHERE c.x_UsageDate = s.day
    ), known AS (
        SELECT x_Cloud AS cloud, x_MachineId AS machine FROM today WHERE x_Class = 'machine' AND x_MachineId IS NOT NULL
        UNION SELECT cloud, machine FROM running
    ), hung AS (
        SELECT DISTINCT cloud, object_id FROM attach_in
    ), tied AS (
        SELECT t.*, early IS NULL AND k.machine IS NOT NULL AS on_machine,
               early IS NULL AND k.machine IS NULL AND h.object_id IS NOT NULL AS on_dependant
        FROM today t LEFT JOIN known k ON t.x_Cloud = k.cloud AND t.x_MachineId = k.machine
             LEFT JOIN hung h ON t.x_Cloud = h.cloud AND t.x_DependantId = h.object_id
    ), placed AS (
        -- Booked whole: what is not usage-based, and a long untied charge. A long charge that is tied to a machine
        -- follows its machine. A period without length, or outside its own day, cannot be spread.
        SELECT *, NOT usage_based OR length <= 0 OR until <= since
                  OR (length > 86400000000000 AND x_Class NOT IN ('machine', 'dependant') AND NOT on_machine) AS whole,
               -- only machines have time, and a number of parts that nobody knows, 0, makes none (4.6)
               CASE WHEN on_machine AND coalesce(x_UnitsPerMachine > 0, true)
                    THEN coalesce(ConsumedQuantity * unit_ns(ConsumedUnit, x_UnitsPerMachine IS NOT NULL),
                                  PricingQuantity * unit_ns(PricingUnit, x_UnitsPerMachine IS NOT NULL)) END AS stated
        FROM tied
    )
    SELECT * EXCLUDE (stated) REPLACE (coalesce(early, CASE
               WHEN on_machine OR on_dependant THEN NULL
               WHEN ChargeCategory = 'Credit' THEN 'credit'
               WHEN ChargeCategory = 'Adjustment' OR ChargeClass = 'Correction' THEN 'adjustment'
               WHEN BilledCost < 0 OR EffectiveCost < 0 THEN 'refund'
               WHEN x_Class IN ('storage', 'shared') THEN x_Class
               WHEN x_Class IN ('untied', 'dependant', 'machine') THEN 'untied'
               ELSE 'other_usage' END) AS early),
           row_number() OVER () AS id,
           -- first and last hour of the charge within the day
           CASE WHEN whole THEN least(greatest(ChargePeriodStart, day_ns), next_ns - 1) ELSE since END
               // 3600000000000 AS first_hour,
           CASE WHEN whole THEN least(greatest(ChargePeriodStart, day_ns), next_ns - 1) ELSE until - 1 END
               // 3600000000000 AS last_hour,
           -- quantity of time of the whole charge, in 1e-12 ns; null where the bill states none
           CASE WHEN stated IS NOT NULL THEN machine_time(stated, x_UnitsPerMachine) END AS quantity
    FROM placed;

-- === Rule 2: hours of a charge (sections 4.3 to 4.5) ================================================================

CREATE TEMP TABLE touch AS
    SELECT id, n * 3600000000000 AS hour,
           greatest(0, least(until, (n + 1) * 3600000000000) - greatest(since, n * 3600000000000)) AS capacity
    FROM (SELECT id, since, until, unnest(range(first_hour, last_hour + 1)) AS n FROM charge);

-- Quantity of the day in ns. A charge within one hour keeps its exact quantity (rule 3); else the total is rounded
-- half-even to ns and telescoped like money. A negative quantity buys no time.
CREATE TEMP TABLE stretch AS
    WITH joined AS (
        SELECT c.id, t.hour, t.capacity, plain, coalesce(r.ns, 0) AS ran,
            CASE WHEN quantity IS NOT NULL
                 THEN telescoped(half_even(greatest(quantity, 0), 1000000000000), since - ChargePeriodStart,
                                 until - ChargePeriodStart, length) END AS stated
        FROM charge c JOIN touch t USING (id)
             LEFT JOIN running r ON r.cloud = c.x_Cloud AND r.machine = c.x_MachineId AND r.hour = t.hour
        WHERE on_machine AND NOT whole AND first_hour < last_hour
    )
    SELECT id, hour, capacity, plain, least(ran, capacity) AS ran,
           coalesce(stated, sum(capacity) OVER day) AS quantity,
           sum(least(ran, capacity)) OVER day AS all_ran,
           sum(capacity) OVER day AS all_capacity,
           sum(capacity - least(ran, capacity)) OVER day_so_far - (capacity - least(ran, capacity)) AS free_before,
           hour = max(hour) OVER day AS is_last
    FROM joined
    WINDOW day AS (PARTITION BY id), day_so_far AS (PARTITION BY id ORDER BY hour ROWS UNBOUNDED PRECEDING);

CREATE TEMP VIEW run_weights AS
    SELECT id AS grp, hour AS pos, quantity AS units, ran AS weight
    FROM stretch WHERE plain AND quantity <= all_ran AND all_ran > 0;

-- Time of a machine's row in each of several hours: by running time; what the bill counts beyond it goes to the
-- earliest free capacity, then to the last hour. Negative and non-usage rows have the capacity as weight.
CREATE TEMP TABLE hourly AS
    SELECT s.id, s.hour, CASE
        WHEN NOT plain THEN capacity
        WHEN quantity <= all_ran THEN coalesce(w.part, 0)
        ELSE ran + greatest(0, least(capacity - ran, quantity - all_ran - free_before))
             + CASE WHEN is_last THEN greatest(0, quantity - all_capacity) ELSE 0 END END AS ns
    FROM stretch s LEFT JOIN largest_remainder('run_weights') w ON w.grp = s.id AND w.pos = s.hour;

-- Money over those hours; all weights zero: the first hour.
CREATE TEMP VIEW hour_weights AS
    SELECT id * 4 + ledger AS grp, hour AS pos,
           CASE ledger WHEN 0 THEN x_DayBilledCost WHEN 1 THEN x_DayEffectiveCost WHEN 2 THEN x_DayPromotionalCost
                       ELSE x_DayListCost END AS units,
           CASE WHEN sum(ns) OVER (PARTITION BY id, ledger) > 0 THEN ns
                WHEN hour = first_hour * 3600000000000 THEN 1 ELSE 0 END AS weight
    FROM hourly JOIN charge USING (id) CROSS JOIN range(4) AS ledgers(ledger)
    WHERE ledger < 3 OR x_DayListCost IS NOT NULL;

CREATE TEMP TABLE part AS
    SELECT grp // 4 AS id, pos AS hour, sum(part) FILTER (grp % 4 = 0) AS billed,
           sum(part) FILTER (grp % 4 = 1) AS effective, sum(part) FILTER (grp % 4 = 2) AS promotional,
           sum(part) FILTER (grp % 4 = 3) AS list
    FROM largest_remainder('hour_weights') GROUP BY ALL
    UNION ALL
    SELECT id, first_hour * 3600000000000, x_DayBilledCost, x_DayEffectiveCost, x_DayPromotionalCost, x_DayListCost
    FROM charge WHERE whole OR (on_machine AND first_hour = last_hour)
    UNION ALL  -- untied and dependant rows: 4.4 on the charge, not on its day part
    SELECT id, hour, telescoped(BilledCost, a, b, length), telescoped(EffectiveCost, a, b, length),
           telescoped(x_PromotionalCost, a, b, length), telescoped(ListCost, a, b, length)
    FROM (SELECT *, greatest(since, hour) - ChargePeriodStart AS a,
                 least(until, hour + 3600000000000) - ChargePeriodStart AS b
          FROM charge JOIN touch USING (id) WHERE NOT whole AND NOT on_machine);

-- === Rules 3, 4, 8: span, devices and estimates of a machine-hour (sections 4.6, 4.13) ==============================

-- Billed span: exact sum per meter (SkuMeter and tie rule), half-even to ns, the largest meter.
CREATE TEMP TABLE billed AS
    SELECT cloud, machine, hour, max(half_even(greatest(quantity, 0), 1000000000000))::BIGINT AS span
    FROM (SELECT x_Cloud AS cloud, x_MachineId AS machine, t.hour, coalesce(SkuMeter, '') AS meter,
                 coalesce(x_TieRule, '') AS what,
                 sum(CASE WHEN h.id IS NOT NULL THEN h.ns * 1000000000000::HUGEINT
                          WHEN quantity IS NULL THEN capacity * 1000000000000::HUGEINT
                          WHEN whole OR (since = ChargePeriodStart AND until = ChargePeriodEnd) THEN quantity
                          ELSE telescoped(half_even(greatest(quantity, 0), 1000000000000), since - ChargePeriodStart,
                                          until - ChargePeriodStart, length) * 1000000000000 END) AS quantity
          FROM charge c JOIN touch t USING (id) LEFT JOIN hourly h ON h.id = c.id AND h.hour = t.hour
          WHERE on_machine AND x_Class = 'machine' AND plain
          GROUP BY ALL)
    GROUP BY ALL;

-- What the day's bill says of a machine: its first type, region and account, whether every row is spot, its watermark.
CREATE TEMP VIEW machine_row AS SELECT * FROM charge WHERE x_Class = 'machine' AND x_MachineId IS NOT NULL;

CREATE TEMP TABLE fact AS
    SELECT x_Cloud AS cloud, x_MachineId AS machine, min(x_InstanceType) AS itype, min(RegionId) AS region,
           min((BillingAccountId, SubAccountId)) AS account, min(m.ns) AS mark,
           bool_and(coalesce(PricingCategory = 'Dynamic', false)) AS is_spot
    FROM machine_row LEFT JOIN marks_in m ON m.cloud = x_Cloud AND m.account = BillingAccountId
                                         AND m.service = coalesce(ServiceName, '')
    GROUP BY ALL;

-- Watermark of machines that the bill does not name: of the services that machines of the cloud are billed under, else of
-- every service of the cloud.
CREATE TEMP TABLE cloud_mark AS
    SELECT m.cloud, coalesce(min(m.ns) FILTER (r.cloud IS NOT NULL), min(m.ns)) AS mark
    FROM marks_in m LEFT JOIN (SELECT DISTINCT x_Cloud AS cloud, coalesce(ServiceName, '') AS service FROM machine_row) r
         ON r.cloud = m.cloud AND r.service = m.service
    GROUP BY ALL;

CREATE TEMP TABLE machine_hour AS
    WITH touched AS (
        SELECT x_Cloud AS cloud, x_MachineId AS machine, hour, min(x_InstanceType) AS itype
        FROM machine_row JOIN touch USING (id) WHERE ChargeCategory = 'Usage' GROUP BY ALL
    ), keys AS (
        SELECT x_Cloud AS cloud, x_MachineId AS machine, hour FROM charge JOIN part USING (id) WHERE on_machine
        UNION SELECT cloud, machine, hour FROM running
    ), facts AS (
        SELECT k.*, coalesce(t.itype, r.itype, d.itype) AS itype, d.region, d.account, coalesce(d.is_spot, false) AS is_spot,
               r.ns IS NOT NULL AS was_seen, b.span IS NOT NULL AS was_billed, coalesce(r.gpus, 0) AS seen_gpus, b.span,
               r.ns AS ran, r.ns IS NOT NULL AND t.cloud IS NULL AND k.hour >= coalesce(d.mark, p.mark, k.hour) AS estimated
        FROM keys k LEFT JOIN running r USING (cloud, machine, hour) LEFT JOIN billed b USING (cloud, machine, hour)
             LEFT JOIN touched t USING (cloud, machine, hour) LEFT JOIN fact d USING (cloud, machine)
             LEFT JOIN cloud_mark p USING (cloud)
    )
    -- A machine-hour has one vector for all its rows (4.7): beyond the watermark its span is the observed running time.
    SELECT row_number() OVER () AS vid,
           f.* REPLACE (CASE WHEN was_billed THEN span WHEN estimated THEN ran ELSE 0 END AS span),
           greatest(coalesce(g.gpus, 0), seen_gpus, 1) AS gpus
    FROM facts f LEFT JOIN counts_in g USING (itype);

-- === Rule 4: the vector of a machine-hour (sections 4.6, 4.7; law 2) ================================================

-- The span of a GPU that is cut into slices, over its slices in device order and then what no slice has.
CREATE TEMP TABLE cut AS
    WITH slices AS (
        SELECT m.vid, span::HUGEINT AS span, parent, did, device, coalesce(slices, 1)::BIGINT AS weight, slices_of_gpu
        FROM seen s JOIN machine_hour m USING (cloud, machine, hour) WHERE parent IS NOT NULL AND span > 0
    ), both_kinds AS (
        SELECT vid, span, parent, did, device, weight FROM slices
        UNION ALL
        SELECT vid, span, parent, NULL, NULL, greatest(max(slices_of_gpu) - sum(weight), 0)::BIGINT FROM slices GROUP BY ALL
    )
    SELECT dense_rank() OVER (ORDER BY vid, parent) AS grp, row_number() OVER (PARTITION BY vid, parent ORDER BY device) AS pos,
           span AS units, weight, vid, parent, did
    FROM both_kinds;

CREATE TEMP TABLE allotted AS
    SELECT vid, parent, did, part FROM cut JOIN largest_remainder('cut') USING (grp, pos);

-- Observed time beside what each device is to have; a device that was seen for less than the span has the rest unobserved.
CREATE TEMP TABLE fitted AS
    WITH devices AS (
        SELECT m.vid, m.span, s.*, coalesce(a.part, span::HUGEINT) AS units
        FROM seen s JOIN machine_hour m USING (cloud, machine, hour) LEFT JOIN allotted a USING (vid, did)
    ), rows AS (
        SELECT vid, did, d.parent, units, span, o.device, job, attempt, rank, category, o.ns
        FROM observed o JOIN devices d USING (cloud, machine, hour, device)
        UNION ALL
        SELECT vid, did, parent, units, span, device, NULL, NULL, NULL, 'unobserved', span - ns FROM devices WHERE span > ns
    ), merged AS (
        SELECT vid, did, parent, units, span, device, job, attempt, rank, category, sum(ns)::BIGINT AS ns
        FROM rows GROUP BY ALL
    )
    SELECT *, sum(ns) OVER (PARTITION BY did) AS device_ns,
           row_number() OVER (PARTITION BY did ORDER BY job, attempt, rank, category) AS pos
    FROM merged;

-- Seen more than billed, or a slice: scaled to what the device is to have.
CREATE TEMP VIEW scale_weights AS
    SELECT did AS grp, pos, units, ns AS weight FROM fitted WHERE span > 0 AND (device_ns > span OR parent IS NOT NULL);

-- A row without time is no row; a vector without rows is one unobserved row without a device.
CREATE TEMP TABLE slice AS
    WITH filled AS (
        SELECT vid, device, job, attempt, rank, category, coalesce(w.part, ns)::BIGINT AS ns
        FROM fitted f LEFT JOIN largest_remainder('scale_weights') w ON w.grp = f.did AND w.pos = f.pos
        UNION ALL  -- what no slice has
        SELECT vid, parent, NULL, NULL, NULL, 'idle', part::BIGINT FROM allotted WHERE did IS NULL
        UNION ALL  -- devices that no reading names
        SELECT vid, NULL, NULL, NULL, NULL, 'unobserved', (gpus - seen_gpus) * span FROM machine_hour WHERE gpus > seen_gpus
    )
    SELECT * FROM filled WHERE ns > 0
    UNION ALL
    SELECT vid, NULL, NULL, NULL, NULL, 'unobserved', 0
    FROM machine_hour WHERE vid NOT IN (SELECT vid FROM filled WHERE ns > 0);

CREATE TEMP TABLE w_spans AS
    SELECT hour AS x_HourUtc, cloud AS x_Cloud, machine AS x_MachineId, device AS x_DeviceId, job AS x_JobId,
           attempt AS x_Attempt, rank AS x_Rank, category AS x_Category, sum(ns)::BIGINT AS x_Ns
    FROM slice JOIN machine_hour USING (vid) WHERE span > 0 GROUP BY ALL;

-- === Rule 6: dependants take the vector of the machines they hang on (section 4.8) ==================================

CREATE TEMP TABLE hanging AS
    SELECT p.id, p.hour, list(DISTINCT vid ORDER BY vid) AS vids
    FROM charge c JOIN part p USING (id)
         JOIN attach_in a ON a.cloud = x_Cloud AND a.object_id = x_DependantId AND a.hour_utc = p.hour
         JOIN machine_hour m ON m.cloud = a.cloud AND m.machine = a.instance_id AND m.hour = p.hour
    WHERE on_dependant AND (was_billed OR was_seen)
    GROUP BY ALL;

-- Volumes that a host names, that no row of the day's bill names in that hour, and that nobody may have billed yet (4.13).
-- Of several machines the first says what the volume is; all share it.
CREATE TEMP TABLE volume AS
    WITH named AS (
        SELECT DISTINCT x_Cloud AS cloud, x_DependantId AS volume, hour FROM charge JOIN touch USING (id)
    ), attached AS (
        SELECT a.cloud, object_id AS volume, hour_utc AS hour, instance_id AS machine, a.bytes, object_type,
               bytes IS NOT NULL AND object_type IS NOT NULL AS is_known, {'region': d.region, 'account': d.account} AS facts,
               coalesce(d.mark, p.mark) AS mark, CASE WHEN was_billed OR was_seen THEN vid END AS vid
        FROM attach_in a LEFT JOIN machine_hour m ON m.cloud = a.cloud AND m.machine = instance_id AND m.hour = hour_utc
             LEFT JOIN fact d ON d.cloud = a.cloud AND d.machine = instance_id LEFT JOIN cloud_mark p ON p.cloud = a.cloud
    )
    SELECT cloud, volume, hour, list(DISTINCT vid ORDER BY vid) FILTER (vid IS NOT NULL) AS vids,
           arg_min(bytes, machine) FILTER (is_known) AS bytes, arg_min(object_type, machine) FILTER (is_known) AS family,
           arg_min(facts, machine).region AS region, arg_min(facts, machine).account AS account
    FROM attached ANTI JOIN named USING (cloud, volume, hour)
    GROUP BY ALL HAVING bool_or(is_known) AND hour >= coalesce(min(mark), hour);

-- Several machines: one vector of all, under an id below zero.
CREATE TEMP TABLE joint AS
    SELECT vids, -row_number() OVER () AS vid
    FROM (SELECT vids FROM hanging WHERE len(vids) > 1 UNION SELECT vids FROM volume WHERE len(vids) > 1);

-- Vectors in address order: code points of UTF-8, numbers as numbers, nulls last; two machines at one address stay two
-- rows, in the order of their ids. When all weights are zero, all money goes to the first row.
CREATE TEMP TABLE vector AS
    WITH sources AS (
        SELECT vid, vid AS home FROM machine_hour UNION ALL SELECT vid, unnest(vids) FROM joint
    ), joined AS (
        SELECT o.vid, o.home, m.machine, s.* EXCLUDE (vid)
        FROM sources o JOIN slice s ON s.vid = o.home JOIN machine_hour m ON m.vid = o.home
    ), merged AS (
        SELECT vid, home, machine, device, job, attempt, rank, category, sum(ns)::BIGINT AS ns FROM joined GROUP BY ALL
    ), placed AS (
        SELECT *, row_number() OVER (PARTITION BY vid ORDER BY device, job, attempt, rank, category, machine) AS pos,
               sum(ns) OVER (PARTITION BY vid) AS total
        FROM merged
    )
    SELECT * EXCLUDE (total), CASE WHEN total > 0 THEN ns WHEN pos = 1 THEN 1 ELSE 0 END AS weight FROM placed;
